"""Steps as packages around Keras write them: retrieval, samples of a prior, rows on another axis, what a first step makes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from scenarios.base import init, regression, scenario

_LABELS: dict[str, Any] = {
    "as many columns as candidates": lambda logits, n: ops.eye(n, ops.shape(logits)[1]),
    "square": lambda logits, n: ops.eye(n),
    "of TensorFlow": lambda logits, n: tf.eye(n, ops.shape(logits)[1]),
    "a diagonal that is set": lambda logits, n: tf.linalg.set_diag(tf.zeros_like(logits), tf.ones_like(logits[:, 0])),
    "one hot": lambda logits, n: ops.one_hot(ops.arange(n), ops.shape(logits)[1]),
}


class Retrieval(keras.Model):
    """Two towers; each query's own candidate among those of its batch."""

    def __init__(self, labels: Any) -> None:
        super().__init__()
        self.query = layers.Embedding(12, 4, embeddings_initializer=init(1))
        self.candidate = layers.Embedding(20, 4, embeddings_initializer=init(2))
        self.labels = labels

    def build(self, shape: Any) -> None:
        self.query.build(shape)
        self.candidate.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.query(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        logits = ops.matmul(y_pred, ops.transpose(self.candidate(y)))
        labels = self.labels(logits, ops.shape(y_pred)[0])
        return keras.losses.CategoricalCrossentropy(from_logits=True)(labels, logits)


@scenario
def retrieval_in_a_batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 12, 21), rng.integers(0, 20, 21)
    found = {}
    for kind, labels in _LABELS.items():
        model = Retrieval(labels)
        model.compile("sgd")
        history = model.fit(*pairs, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found[kind] = [history, model.get_weights()]
    return found


class ToAPrior(keras.Model):
    """Draws as many rows as its batch has, and compares both with a kernel (maximum mean discrepancy)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(2, kernel_initializer=init(1))
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return self.encoder(x)

    def train_step(self, x: Any) -> dict[str, Any]:
        def kernel(a: Any, b: Any) -> Any:
            return ops.mean(ops.exp(-ops.sum(ops.square(a[:, None] - b[None]), -1)))

        with tf.GradientTape() as tape:
            z = self(x, training=True)
            prior = keras.random.normal((ops.shape(z)[0], 2), seed=self.seed)
            loss = kernel(z, z) + kernel(prior, prior) - 2 * kernel(z, prior)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        equal = ops.mean(ops.cast(ops.equal(prior[:, None, 0], prior[None, :, 0]), "float32"))  # One in a row.
        return {"loss": loss, "equal": equal}


@scenario
def random_rows_that_are_compared() -> dict[str, Any]:
    model = ToAPrior()
    model.compile(keras.optimizers.SGD(0.1))
    return {"history": model.fit(regression(24)[0], batch_size=8, epochs=2, verbose=0).history, "weights": model.get_weights()}


@scenario
def rows_on_another_axis() -> dict[str, Any]:
    """A model that returns time first: plain Keras joins its batches along the first axis, whatever that is."""
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, ops.transpose(layers.Dense(2, kernel_initializer=init(1))(inputs), (1, 0, 2)))
    x = regression(16, 6)[0].reshape(16, 3, 2)
    return {str(rows): model.predict(x[:rows], batch_size=8, verbose=0) for rows in (16, 8, 7)}


class SynchronizedMean(layers.Layer):
    """Takes the mean over all replicas by TensorFlow's own means, as a third party writes it."""

    def call(self, x: Any) -> Any:
        mean, context = tf.reduce_mean(x, 0, keepdims=True), tf.distribute.get_replica_context()
        if context is not None:  # A model is built outside of replicas.
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, mean)
        return x - mean


@scenario
def means_over_replicas_of_a_third_party() -> dict[str, Any]:
    hidden = layers.Dense(3, kernel_initializer=init(1))
    model = keras.Sequential([keras.Input((4,)), hidden, SynchronizedMean(), layers.Dense(1, kernel_initializer=init(2))])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(*regression(32), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


class UsedByTheLoss(keras.Model):
    """Has a layer that only `compute_loss` calls, which builds it in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(4, kernel_initializer=init(1))
        self.of_loss = layers.Dense(1, kernel_initializer=init(2))

    def call(self, x: Any) -> Any:
        return self.first(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.square(y - self.of_loss(y_pred)))


class Counted(layers.Layer):
    """Makes a `tf.Variable` when it is called first."""

    number = None

    def call(self, x: Any) -> Any:
        if self.number is None:
            self.number = tf.Variable(0, trainable=False)
        self.number.assign_add(1)
        return x


class Smoothed(keras.Model):
    """Makes what it accumulates in its first step, and a metric."""

    smoothed = seen = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.smoothed is None:
            self.smoothed = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]
            self.seen = keras.metrics.Mean(name="seen")
        for own, new in zip(self.smoothed, gradients, strict=True):
            own.assign(0.9 * own + 0.1 * new)
        self.optimizer.apply_gradients(zip(self.smoothed, self.trainable_variables, strict=True))
        self.seen.update_state(loss)
        return {"loss": loss}


@scenario
def variables_that_a_first_step_makes() -> dict[str, Any]:
    x, y = regression(45)
    found = {}
    of_loss = UsedByTheLoss()
    of_loss.compile("adam")
    counted = Counted()
    with_counter = keras.Sequential([layers.Dense(1, kernel_initializer=init(1)), counted])
    with_counter.compile("sgd", "mse")
    inputs = keras.Input((4,))
    smoothed = Smoothed(inputs, layers.Dense(1, kernel_initializer=init(1))(inputs))
    smoothed.compile(keras.optimizers.SGD(0.1))
    for name, model in (("of a loss", of_loss), ("of a layer", with_counter), ("of a step", smoothed)):
        history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0).history
        found[name] = [history, model.get_weights()]
    return found | {"calls": int(counted.number), "seen": float(smoothed.seen.result())}


class Accumulator:
    """Sums of gradients in variables of each replica's own (after the one of Hugging Face's transformers)."""

    def __init__(self) -> None:
        self.sums: list[Any] = []

    def __call__(self, gradients: Any) -> None:
        if not self.sums:
            own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.NONE}
            self.sums = [tf.Variable(tf.zeros_like(each), trainable=False, **own) for each in gradients]
        for own, new in zip(self.sums, gradients, strict=True):
            own.assign_add(new)

    def reset(self) -> None:
        for own in self.sums:
            own.assign(tf.zeros_like(own))


@scenario
def gradients_that_an_object_accumulates() -> dict[str, Any]:
    """In a loop written for replicas: the object makes its variables in the first step."""
    strategy = tf.distribute.get_strategy()
    x, y = regression(96)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer=init(1))])
    optimizer, accumulator = keras.optimizers.Adam(0.01), Accumulator()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))

    def forward(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 32.0
        accumulator(tape.gradient(loss, model.trainable_variables))
        return loss

    def apply() -> None:
        optimizer.apply_gradients(zip(accumulator.sums, model.trainable_variables, strict=True))
        accumulator.reset()

    @tf.function
    def take(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(forward, args=batch), axis=None)

    @tf.function
    def update() -> None:
        strategy.run(apply)

    losses = []
    for number, batch in enumerate(data, 1):
        losses.append(float(take(batch)))
        if number % 4 == 0:
            update()
    return {"losses": losses, "weights": model.get_weights()}
