"""The programs of TF-Replicator's RFC and of Sonnet's documentation, on our API; the same text for every strategy."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

GLOBAL_BATCH = 12


def _examples():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(48, 4)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32")


def _dense(units, seed, **kwargs):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **kwargs)


def _classification_step(model, optimizer):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step_fn(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step_fn


def classification(repl):
    """The RFC's first example: `input_fn`, `step_fn`, a wrapped optimizer."""

    def input_fn(ctx):
        x, y = _examples()
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
        return data.shard(ctx.num_input_pipelines, ctx.input_pipeline_id).batch(ctx.get_per_replica_batch_size(GLOBAL_BATCH))

    with repl.context():
        model = keras.Sequential([keras.Input((4,)), _dense(8, 1, activation="relu"), _dense(2, 2)])
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    step_fn = _classification_step(model, optimizer)
    losses = [float(repl.reduce(repl.run(step_fn, input_fn))) for _ in range(3)]
    losses.append(float(repl.reduce(repl.run(step_fn, input_fn, steps=3))))
    return losses, [w.numpy() for w in model.weights]


def gan(repl):
    """Two optimizers in one step."""

    def input_fn(ctx):
        return tf.data.Dataset.from_tensors(tf.ones([ctx.get_per_replica_batch_size(GLOBAL_BATCH), 2])).repeat()

    with repl.context():
        generator = keras.Sequential([keras.Input((3,)), _dense(2, 1)])
        critic = keras.Sequential([keras.Input((2,)), _dense(4, 2, activation="tanh"), _dense(1, 3)])
        optimizers = [repl.wrap_optimizer(keras.optimizers.Adam(0.01)) for _ in range(2)]
        noise = tf.reshape(tf.range(12 * 3, dtype=tf.float32) / 36, [12, 3])

    def step_fn(real):
        rows = tf.shape(real)[0]
        first = tf.cast(tfrep.replica_id(), tf.int32) * rows
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(noise[first : first + rows])
            critic_loss = tf.reduce_mean(tf.nn.softplus(critic(fake)) + tf.nn.softplus(-critic(real)))
            generator_loss = tf.reduce_mean(tf.nn.softplus(-critic(fake)))
        for net, loss, optimizer in ((critic, critic_loss, optimizers[0]), (generator, generator_loss, optimizers[1])):
            optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))
        return {"critic": critic_loss, "generator": generator_loss}

    losses = [tf.nest.map_structure(float, repl.reduce(repl.run(step_fn, input_fn))) for _ in range(3)]
    return losses, [w.numpy() for w in generator.weights + critic.weights]


def reinforcement_learning(repl):
    """The RFC's IMPALA case: the input function returns a callable that takes from a queue which actors fill."""

    def input_fn():
        queue = tf.queue.FIFOQueue(20, [tf.float32, tf.float32], [[4, 2], [4]])
        for i in range(6):
            queue.enqueue((tf.fill([4, 2], float(i)), tf.fill([4], 2.0 * i)))
        return queue.dequeue

    with repl.context():
        policy = keras.Sequential([keras.Input((2,)), _dense(1, 1)])
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.01))

    def step_fn(batch):
        observation, reward = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((policy(observation)[:, 0] - reward) ** 2)
        optimizer.apply(tape.gradient(loss, policy.trainable_variables), policy.trainable_variables)
        return tfrep.all_gather(reward[:1])

    first = repl.local_results(repl.run(step_fn, input_fn))[0].numpy()
    np.testing.assert_array_equal(first, np.zeros(repl.num_replicas_in_sync))
    third = repl.local_results(repl.run(step_fn, input_fn, steps=2))[0].numpy()
    np.testing.assert_array_equal(third, np.full(repl.num_replicas_in_sync, 4.0))  # The third batch of each queue.
    assert all(np.isfinite(w.numpy()).all() for w in policy.weights)
    return [tf.identity(w).numpy() for w in policy.weights]


def numbered_queue(repl):
    """One queue for all replicas, which take from it in turn."""

    def input_fn():
        queue = tf.queue.FIFOQueue(20, [tf.int32], [[1]])
        for i in range(12):
            queue.enqueue([[i]])
        return queue.dequeue

    n = repl.num_replicas_in_sync
    for step in range(2):
        taken = repl.local_results(repl.run(tfrep.all_gather, input_fn))[0].numpy()
        np.testing.assert_array_equal(taken, np.arange(step * n, (step + 1) * n))


class GlobalBatchNorm(keras.layers.Layer):
    """The blog post's example of a primitive in a layer: statistics of the global batch."""

    def call(self, x):
        mean = tfrep.all_mean(tf.reduce_mean(x, 0))
        variance = tfrep.all_mean(tf.reduce_mean((x - mean) ** 2, 0))
        return (x - mean) / tf.sqrt(variance + 1e-3)


def global_batch_norm(repl):
    """Equal to one device's batch normalisation of the global batch."""

    def input_fn(ctx):
        x, y = _examples()
        rows = ctx.get_per_replica_batch_size(GLOBAL_BATCH)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)

    with repl.context():
        model = keras.Sequential([keras.Input((4,)), _dense(5, 1), GlobalBatchNorm(), _dense(2, 2)])
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.2))
    step_fn = _classification_step(model, optimizer)
    losses = [float(repl.reduce(repl.run(step_fn, input_fn))) for _ in range(4)]
    return losses, [w.numpy() for w in model.weights]


def sonnet(repl):
    """Sonnet's documented loop: gradients are reduced by hand, and plain variables updated."""
    with repl.context():
        w = tf.Variable(tf.ones([3, 1]))

    def input_fn():
        return tf.data.Dataset.from_tensors(tf.ones([2, 3])).repeat()

    def step_fn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x * (1.0 + tf.cast(tfrep.replica_id(), tf.float32)), w)))
        gradient = tfrep.all_mean(tape.gradient(loss, w))
        w.assign_sub(0.01 * gradient)
        return gradient

    gradients = repl.local_results(repl.run(step_fn, input_fn))
    n = repl.num_replicas_in_sync
    expected = sum(6 * (1 + r) ** 2 for r in range(n)) / n
    np.testing.assert_allclose(gradients[0], np.full([3, 1], expected), rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), 1 - 0.01 * np.full([3, 1], expected), rtol=1e-5)


PROGRAMS = {f.__name__: f for f in (classification, gan, global_batch_norm, numbered_queue, reinforcement_learning, sonnet)}


def run(strategy, name, mode):
    """Runs a program on a strategy that exists already; `mode` is the name of an `InputReplicationMode`."""
    keras.utils.set_random_seed(0)
    with tfrep.Replicator(strategy, input_replication_mode=tfrep.InputReplicationMode[mode]) as repl:
        return PROGRAMS[name](repl)
