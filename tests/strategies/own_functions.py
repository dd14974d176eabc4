"""Loops as people write them for one device: each returns its losses, and all variables at the end.

They compute in 64 bits. Kinks and Adam would amplify what replicas round otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
Results = tuple[list[Any], list[np.ndarray]]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _values(*owners: Any) -> list[np.ndarray]:
    return [v.numpy() for owner in owners for v in getattr(owner, "variables", owner)]


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def gan(function: Decorator) -> Results:
    """As many rows of noise in each step; the last batch has fewer pictures."""
    generator = keras.Sequential(
        [
            keras.Input((8,)), L.Dense(7 * 7 * 4, use_bias=False), L.BatchNormalization(), L.LeakyReLU(), L.Reshape((7, 7, 4)),
            L.Conv2DTranspose(1, 5, strides=2, padding="same", activation="tanh"),
        ]
    )  # fmt: skip
    discriminator = keras.Sequential(
        [keras.Input((14, 14, 1)), L.Conv2D(4, 5, strides=2), L.LeakyReLU(), L.Dropout(0.3), L.Flatten(), L.Dense(1)]
    )
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    of_generator, of_discriminator = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)

    @function
    def train_step(images: tf.Tensor) -> Any:
        noise = tf.random.normal([8, 8], dtype=tf.float64)
        with tf.GradientTape() as first, tf.GradientTape() as second:
            fake = generator(noise, training=True)
            of_real, of_fake = discriminator(images, training=True), discriminator(fake, training=True)
            deceived = cross_entropy(tf.ones_like(of_fake), of_fake)
            told = cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_fake), of_fake)
        gradients = first.gradient(deceived, generator.trainable_variables)
        of_generator.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
        gradients = second.gradient(told, discriminator.trainable_variables)
        of_discriminator.apply_gradients(zip(gradients, discriminator.trainable_variables, strict=True))
        return deceived, told

    data = tf.data.Dataset.from_tensor_slices(_rows(21, 14, 14, 1)).batch(8)
    losses = [train_step(images) for images in data]
    return losses, _values(generator, discriminator, of_generator, of_discriminator)


def penalized(function: Decorator) -> Results:
    """WGAN-GP: a gradient of a gradient, by mixtures of rows."""
    critic = keras.Sequential([keras.Input((6,)), L.Dense(8, "softplus"), L.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)

    @function
    def train_step(real: tf.Tensor) -> tf.Tensor:
        count = tf.shape(real)[0]
        fake = tf.random.normal([count, 6], dtype=tf.float64)
        mixed = fake + tf.random.uniform([count, 1], dtype=tf.float64) * (real - fake)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                told = critic(mixed)
            slopes = tf.norm(inner.gradient(told, mixed), axis=1)
            loss = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real)) + 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
        optimizer.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        return loss

    return [train_step(rows) for rows in tf.data.Dataset.from_tensor_slices(_rows(13, 6)).batch(5)], _values(critic, optimizer)


def replayed(function: Decorator) -> Results:
    """DQN: rows of a replay buffer, as NumPy has them; a second network that follows the first."""

    def network() -> Any:
        return keras.Sequential([keras.Input((4,)), L.Dense(8, "tanh"), L.Dense(3)])

    online, target, optimizer = network(), network(), keras.optimizers.Adam(1e-2)

    @function
    def update(state: Any, action: Any, reward: Any, after: Any, discount: float = 0.9) -> tf.Tensor:
        wanted = reward + discount * tf.reduce_max(target(after), axis=1)
        with tf.GradientTape() as tape:
            chosen = tf.reduce_sum(online(state) * tf.one_hot(action, 3, dtype=tf.float64), axis=1)
            loss = tf.reduce_mean(keras.losses.huber(wanted[:, None], chosen[:, None]))
        optimizer.apply(tape.gradient(loss, online.trainable_variables), online.trainable_variables)
        for own, followed in zip(target.weights, online.weights, strict=True):
            own.assign(0.9 * own + 0.1 * followed)
        return loss

    rows, draw = _rows(20, 9), np.random.default_rng(1)
    losses = []
    for size in (7, 7, 4):
        batch = rows[draw.integers(0, 20, size)]
        losses.append(update(batch[:, :4], (batch[:, 8] > 0).astype("int64"), batch[:, 4], batch[:, 4:8]))
    return losses, _values(online, target, optimizer)


def physics(function: Decorator) -> Results:
    """A physics-informed network: points are drawn inside of the step by a generator object, and second derivatives taken."""
    net = keras.Sequential([keras.Input((1,)), L.Dense(8, "tanh"), L.Dense(1)])
    optimizer, draws = keras.optimizers.Adam(1e-2), tf.random.Generator.from_seed(5)

    @function
    def train_step() -> tf.Tensor:
        points = draws.uniform([11, 1], dtype=tf.float64)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(points)
                with tf.GradientTape() as first:
                    first.watch(points)
                    value = net(points)
                slope = first.gradient(value, points)
            curve = second.gradient(slope, points)
            edges = net(tf.constant([[0.0], [1.0]], tf.float64))
            loss = tf.reduce_mean((curve + tf.sin(points)) ** 2) + tf.reduce_mean(edges**2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    return [train_step() for _ in range(3)], _values(net, optimizer)


def accumulated(function: Decorator) -> Results:
    """Gradients that are added up by hand, metrics, moving averages by hand, and a method of a class."""

    class Trainer:
        def __init__(self) -> None:
            self.net = keras.Sequential([keras.Input((3,)), L.Dense(5, "gelu"), L.Dropout(0.2), L.Dense(1)])
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            self.sums = [tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False) for v in self.net.trainable_variables]
            self.averages = [tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False) for v in self.net.trainable_variables]
            self.count = tf.Variable(0, trainable=False)
            self.error, self.largest = keras.metrics.MeanAbsoluteError(), tf.Variable(0.0, dtype=tf.float64, trainable=False)

        @function
        def train_step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                told = self.net(x, training=True)
                loss = tf.reduce_mean((told - y) ** 2)
            for own, gradient in zip(self.sums, tape.gradient(loss, self.net.trainable_variables), strict=True):
                own.assign_add(gradient)
            self.count.assign_add(1)
            self.error.update_state(y, told)
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(told))))
            if self.count % 2 == 0:
                self.optimizer.apply([own / 2.0 for own in self.sums], self.net.trainable_variables)
                for own in self.sums:
                    own.assign(tf.zeros_like(own))
            for average, own in zip(self.averages, self.net.trainable_variables, strict=True):
                average.assign(0.9 * average + 0.1 * own)
            return loss

    trainer, rows = Trainer(), _rows(17, 4)
    trainer.optimizer.build(trainer.net.trainable_variables)
    losses = [trainer.train_step(x[:, :3], x[:, 3:]) for x in tf.data.Dataset.from_tensor_slices(rows).batch(5)]
    losses += [trainer.error.result(), trainer.largest.numpy()]
    return losses, _values(trainer.net, trainer.optimizer, trainer.averages, trainer.sums)


def variational(function: Decorator) -> Results:
    """A variational autoencoder: noise for each row, and metrics that are reset."""
    encoder = keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(4)])
    decoder = keras.Sequential([keras.Input((2,)), L.Dense(8, "tanh"), L.Dense(6)])
    optimizer, mean = keras.optimizers.Adam(1e-2), keras.metrics.Mean()
    weights = encoder.trainable_variables + decoder.trainable_variables

    @function
    def train_step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            center, log_variance = tf.split(encoder(x), 2, axis=1)
            noise = tf.random.normal(tf.shape(center), dtype=tf.float64)
            told = decoder(center + noise * tf.exp(0.5 * log_variance))
            rebuilt = tf.reduce_sum(keras.losses.mean_squared_error(x, told)) / tf.cast(tf.shape(x)[0], tf.float64)
            divergence = -0.5 * tf.reduce_mean(tf.reduce_sum(1.0 + log_variance - center**2 - tf.exp(log_variance), 1))
            loss = rebuilt + divergence
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        mean.update_state(loss)

    losses = []
    for _ in range(2):
        for rows in tf.data.Dataset.from_tensor_slices(_rows(11, 6)).batch(4):
            train_step(rows)
        losses.append(mean.result())
        mean.reset_state()
    return losses, _values(encoder, decoder, optimizer)


def translated(function: Decorator) -> Results:
    """Sentences in two languages: attention with masks, a loss that leaves padding out, a schedule of learning rates."""

    class Rate(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            step = keras.ops.cast(step, "float64") + 1.0
            return 0.05 * keras.ops.minimum(keras.ops.rsqrt(step), step * 0.1)

    words = keras.Input((5,), dtype="int64"), keras.Input((4,), dtype="int64")
    source = L.Embedding(9, 8, mask_zero=True)(words[0])
    target = L.Embedding(7, 8, mask_zero=True)(words[1])
    target = L.LayerNormalization()(target + L.MultiHeadAttention(2, 4)(target, target, use_causal_mask=True))
    target = L.LayerNormalization()(target + L.MultiHeadAttention(2, 4)(target, source))
    model = keras.Model(words, L.Dense(7)(target))
    optimizer = keras.optimizers.Adam(Rate(), beta_2=0.98)

    @function
    def train_step(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            told = model([source, target[:, :-1]], training=True)
            losses = keras.losses.sparse_categorical_crossentropy(target[:, 1:], told, from_logits=True)
            kept = tf.cast(target[:, 1:] != 0, losses.dtype)
            loss = tf.reduce_sum(losses * kept) / tf.reduce_sum(kept)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    draw = np.random.default_rng(0)
    data = draw.integers(0, 9, (11, 5)), draw.integers(0, 7, (11, 5))
    losses = [train_step(*rows) for rows in tf.data.Dataset.from_tensor_slices(data).batch(4)]
    return losses, _values(model, optimizer)


def captioned(function: Decorator) -> Results:
    """A loop of Python over words, with a state that begins with zeros for each row."""
    words, cell, out = L.Embedding(9, 6), L.GRUCell(5), L.Dense(9)
    features, optimizer = L.Dense(6, "tanh"), keras.optimizers.Adam(1e-2)
    for layer, shape in ((words, (None, 1)), (cell, (None, 12)), (out, (None, 5)), (features, (None, 3))):
        layer.build(shape)
    weights = [v for layer in (words, cell, out, features) for v in layer.trainable_variables]

    @function
    def train_step(pictures: tf.Tensor, captions: tf.Tensor) -> Any:
        loss, state = 0.0, tf.zeros([captions.shape[0], 5], tf.float64)
        given = tf.expand_dims(tf.constant([1] * captions.shape[0]), 1)
        with tf.GradientTape() as tape:
            seen = features(pictures)
            for i in range(1, captions.shape[1]):
                told, _ = cell(tf.concat([words(given)[:, 0], seen], 1), [state])
                state = told
                loss += tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(captions[:, i], out(told), from_logits=True))
                given = tf.expand_dims(captions[:, i], 1)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss / float(captions.shape[1])

    draw = np.random.default_rng(0)
    data = draw.normal(size=(10, 3)), draw.integers(1, 9, (10, 4)).astype("int32")
    return [train_step(*rows) for rows in tf.data.Dataset.from_tensor_slices(data).batch(4)], _values(weights, optimizer)


def compared(function: Decorator) -> Results:
    """Triplets, rows that are compared with all others, and a step for evaluation that changes nothing."""
    tower, optimizer = keras.Sequential([keras.Input((5,)), L.Dense(8, "tanh"), L.Dense(3)]), keras.optimizers.RMSprop(1e-2)

    @function
    def train_step(anchor: tf.Tensor, positive: tf.Tensor, negative: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            a, p, n = tower(anchor), tower(positive), tower(negative)
            margins = tf.reduce_sum((a - p) ** 2, -1) - tf.reduce_sum((a - n) ** 2, -1) + 0.5
            likeness = tf.matmul(a, p, transpose_b=True)
            labels = tf.range(tf.shape(likeness)[0])
            told = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, likeness)
            loss = tf.reduce_mean(tf.nn.softplus(margins)) + tf.reduce_mean(told)
        optimizer.apply_gradients(zip(tape.gradient(loss, tower.trainable_variables), tower.trainable_variables, strict=True))
        return loss

    @function
    def evaluated(rows: tf.Tensor) -> tf.Tensor:
        return tower(rows)

    data = tuple(_rows(3, 9, 5))
    losses = [train_step(*rows) for rows in tf.data.Dataset.from_tensor_slices(data).batch(4)]
    return [*losses, evaluated(data[0])], _values(tower, optimizer)


def scaled(function: Decorator) -> Results:
    """A scaled loss, a persistent tape, a penalty of layers, and weights of rows."""
    model = keras.Sequential(
        [keras.Input((4,)), L.Dense(6, "tanh", kernel_regularizer="l2"), L.BatchNormalization(), L.Dropout(0.3), L.Dense(1)]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0, dynamic_growth_steps=2)
    average = keras.metrics.MeanSquaredError()

    @function
    def train_step(x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            told = model(x, training=True)
            loss = tf.reduce_sum(weight * (told[:, 0] - y) ** 2) / tf.reduce_sum(weight) + tf.add_n(model.losses)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        norm = tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables))
        optimizer.apply(gradients, model.trainable_variables)
        average.update_state(y[:, None], told, sample_weight=weight)
        return loss + norm

    rows = _rows(13, 6)
    data = rows[:, :4], rows[:, 4], np.abs(rows[:, 5])
    losses = [train_step(*batch) for batch in tf.data.Dataset.from_tensor_slices(data).batch(5)]
    return [*losses, average.result()], _values(model, optimizer)


def translated_pictures(function: Decorator) -> Results:
    """pix2pix: a generator with skips, a critic of patches that sees pairs, an L1 term; two optimizers."""
    given = keras.Input((8, 8, 2))
    low = L.Conv2D(4, 4, 2, "same", activation="silu")(given)
    lower = L.BatchNormalization()(L.Conv2D(4, 4, 2, "same")(low))
    up = L.Dropout(0.5)(L.BatchNormalization()(L.Conv2DTranspose(4, 4, 2, "same")(lower)))
    generator = keras.Model(given, L.Conv2DTranspose(2, 4, 2, "same", activation="tanh")(L.Concatenate()([up, low])))
    pair = [keras.Input((8, 8, 2)), keras.Input((8, 8, 2))]
    critic = keras.Model(pair, L.Conv2D(1, 3)(L.Conv2D(4, 4, 2, "same", activation="silu")(L.Concatenate()(pair))))
    of_generator, of_critic = keras.optimizers.Adam(2e-4, beta_1=0.5), keras.optimizers.Adam(2e-4, beta_1=0.5)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @function
    def train_step(pictures: tf.Tensor, target: tf.Tensor) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = generator(pictures, training=True)
            real, fake = critic([pictures, target], training=True), critic([pictures, made], training=True)
            deceived = cross_entropy(tf.ones_like(fake), fake) + 100.0 * tf.reduce_mean(tf.abs(target - made))
            told = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        of_first = first.gradient(deceived, generator.trainable_variables)
        of_second = second.gradient(told, critic.trainable_variables)
        of_generator.apply_gradients(zip(of_first, generator.trainable_variables, strict=True))
        of_critic.apply_gradients(zip(of_second, critic.trainable_variables, strict=True))
        return deceived, told

    rows = _rows(2, 5, 8, 8, 2)
    losses = [train_step(*batch) for batch in tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(3)]
    return losses, _values(generator, critic, of_generator, of_critic)


def cycled(function: Decorator) -> Results:
    """CycleGAN: two generators, two critics, one persistent tape, pairs of two data sets that were zipped."""

    def generator() -> Any:
        return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), L.GroupNormalization(2), L.Dense(6)])

    def critic() -> Any:
        return keras.Sequential([keras.Input((6,)), L.Dense(6, "gelu"), L.Dense(1)])

    there, back, of_there, of_back = generator(), generator(), critic(), critic()
    nets = (there, back, of_there, of_back)
    optimizers = [keras.optimizers.Adam(1e-3) for _ in nets]

    @function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = there(x, training=True), back(y, training=True)
            again = tf.reduce_mean(tf.abs(back(fake_y) - x)) + tf.reduce_mean(tf.abs(there(fake_x) - y))
            same = tf.reduce_mean((there(y) - y) ** 2), tf.reduce_mean((back(x) - x) ** 2)
            losses = [
                tf.reduce_mean((of_there(fake_y) - 1.0) ** 2) + 10.0 * again + 5.0 * same[0],
                tf.reduce_mean((of_back(fake_x) - 1.0) ** 2) + 10.0 * again + 5.0 * same[1],
                0.5 * (tf.reduce_mean((of_there(y) - 1.0) ** 2) + tf.reduce_mean(of_there(fake_y) ** 2)),
                0.5 * (tf.reduce_mean((of_back(x) - 1.0) ** 2) + tf.reduce_mean(of_back(fake_x) ** 2)),
            ]
        for net, optimizer, loss in zip(nets, optimizers, losses, strict=True):
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return losses

    first, second = (tf.data.Dataset.from_tensor_slices(rows).batch(4) for rows in _rows(2, 11, 6))
    return [train_step(x, y) for x, y in tf.data.Dataset.zip((first, second))], _values(*nets, *optimizers)


def acted(function: Decorator) -> Results:
    """A2C: an episode in a loop of the graph, with arrays of what happened; returns that are made from its end."""
    actor, optimizer = keras.Sequential([keras.Input((3,)), L.Dense(8, "tanh"), L.Dense(3)]), keras.optimizers.Adam(1e-2)
    drawn = tf.random.Generator.from_seed(2)

    @function
    def train_step(state: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            chances, values, rewards = (tf.TensorArray(tf.float64, 4) for _ in range(3))
            for t in tf.range(4):
                told = actor(state)
                action = tf.cast(drawn.uniform([tf.shape(state)[0]], dtype=tf.float64) < tf.sigmoid(told[:, 0]), tf.int32)
                likelihood = tf.nn.log_softmax(told[:, :2])
                chances = chances.write(t, tf.gather(likelihood, action, batch_dims=1))
                values = values.write(t, told[:, 2])
                state = tf.tanh(state + 0.1 * tf.cast(action[:, None], tf.float64))
                rewards = rewards.write(t, tf.reduce_sum(state, 1))
            returns = tf.reverse(tf.math.cumsum(tf.reverse(rewards.stack(), [0]) * 0.9), [0])
            returns = (returns - tf.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-7)
            told, better = values.stack(), returns - values.stack()
            loss = tf.reduce_mean(keras.losses.huber(returns, told)) - tf.reduce_mean(chances.stack() * tf.stop_gradient(better))
        optimizer.apply(tape.gradient(loss, actor.trainable_variables), actor.trainable_variables)
        return loss

    return [train_step(rows) for rows in tf.data.Dataset.from_tensor_slices(_rows(11, 3)).batch(4)], _values(actor, optimizer)


def styled(function: Decorator) -> Results:
    """Style transfer: one picture, which is the variable; there are no rows to share."""
    features = keras.Sequential([keras.Input((8, 8, 3)), L.Conv2D(4, 3, activation="tanh"), L.Conv2D(4, 3)])
    picture = tf.Variable(tf.sigmoid(_rows(1, 8, 8, 3)), trainable=True)
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build([picture])

    def style(maps: tf.Tensor) -> tf.Tensor:
        return tf.einsum("bijc,bijd->bcd", maps, maps) / 16.0

    @function
    def train_step(content: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            maps = features(picture)
            loss = tf.reduce_mean((style(maps) - 0.5) ** 2) + tf.reduce_mean((maps - features(content)) ** 2)
            loss += 1e-3 * tf.reduce_sum(tf.image.total_variation(picture))
        optimizer.apply_gradients([(tape.gradient(loss, picture), picture)])
        picture.assign(tf.clip_by_value(picture, 0.0, 1.0))
        return loss

    return [train_step(tf.sigmoid(_rows(1, 8, 8, 3)[:, ::-1])) for _ in range(3)], [picture.numpy(), *_values(optimizer)]


def federated(function: Decorator) -> Results:
    """Federated averaging: one function trains the models of several clients, whose weights are averaged by eager code."""

    def network() -> Any:
        return keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh"), L.Dense(1)])

    clients, server = [network() for _ in range(2)], network()
    optimizers = [keras.optimizers.SGD(0.1) for _ in clients]

    @function
    def train_step(model: Any, optimizer: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for _ in range(2):
        for client, optimizer, rows in zip(clients, optimizers, np.split(_rows(14, 5), 2), strict=True):
            client.set_weights(server.get_weights())
            for x in tf.data.Dataset.from_tensor_slices(rows).batch(4):
                losses.append(train_step(client, optimizer, x[:, :4], x[:, 4:]))
        server.set_weights([np.mean(each, 0) for each in zip(*(client.get_weights() for client in clients), strict=True)])
    return losses, _values(server, *clients)


def in_two_phases(function: Decorator) -> Results:
    """First the head, then all layers at another rate; summaries, and a `CheckpointManager` between the phases."""
    body = keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.BatchNormalization()])
    head, optimizer = keras.Sequential([keras.Input((6,)), L.Dense(1)]), keras.optimizers.Adam(0.05)
    optimizer.build(body.trainable_variables + head.trainable_variables)
    count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @function
    def train_step(x: tf.Tensor, y: tf.Tensor, trains_body: bool) -> tf.Tensor:
        variables = body.trainable_variables * trains_body + head.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((head(body(x, training=trains_body)) - y) ** 2)
        gradients = dict(zip([v.path for v in variables], tape.gradient(loss, variables), strict=True))
        every = body.trainable_variables + head.trainable_variables
        optimizer.apply([gradients.get(v.path, tf.zeros(v.shape, v.dtype)) for v in every], every)
        count.assign_add(1)
        tf.summary.scalar("loss", loss, step=count)
        return loss

    data = tf.data.Dataset.from_tensor_slices(_rows(11, 5)).batch(4)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(body=body, head=head, optimizer=optimizer, count=count)
        manager = tf.train.CheckpointManager(checkpoint, f"{folder}/checkpoints", max_to_keep=2)
        with tf.summary.create_file_writer(f"{folder}/summaries").as_default():
            for trains_body in (False, True):
                losses += [train_step(x[:, :4], x[:, 4:], trains_body) for x in data]
                if not trains_body:
                    manager.save()
                    optimizer.learning_rate.assign(0.01)
            checkpoint.restore(manager.latest_checkpoint).expect_partial()
            losses += [train_step(x[:, :4], x[:, 4:], True) for x in data]
    return losses, _values(body, head, optimizer, [count])


def in_epochs(function: Decorator) -> Results:
    """A function reads a data set from end to end, and stops early; the last batch has fewer rows, and there is a metric."""
    network = keras.Sequential([keras.Input((3, 2)), L.LSTM(4), L.BatchNormalization(), L.Dropout(0.3), L.Dense(1)])
    optimizer, mean = keras.optimizers.Adam(0.05), keras.metrics.Mean(dtype="float64")
    optimizer.build(network.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices((_rows(13, 3, 2), _rows(13, 1))).shuffle(13).batch(4).prefetch(1)

    @function
    def epoch(data: tf.data.Dataset, worst: tf.Tensor) -> tf.Tensor:
        last = tf.constant(0.0, tf.float64)
        for x, y in data:
            with tf.GradientTape() as tape:
                last = tf.reduce_mean((network(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(last, network.trainable_variables), network.trainable_variables)
            mean.update_state(last)
            if last > worst:
                break
        return last

    losses = [epoch(data, tf.constant(worst, tf.float64)) for worst in (1e9, 1e9, 0.0)]
    return [*losses, mean.result()], _values(network, optimizer)


def in_steps(function: Decorator) -> Results:
    """A function takes several batches from an iterator at each call; noise is drawn for the rows of each."""
    network, optimizer = keras.Sequential([keras.Input((2,)), L.Dense(4, "tanh"), L.Dense(1)]), keras.optimizers.SGD(0.1)
    data = iter(tf.data.Dataset.from_tensor_slices({"x": _rows(15, 2), "y": _rows(15)}).repeat().batch(4))
    sums = tf.Variable(tf.zeros([2], tf.float64))

    def step(rows: Any) -> tf.Tensor:
        noise = tf.random.stateless_normal(tf.shape(rows["x"]), [1, 2], dtype=tf.float64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(rows["x"] + noise)[:, 0] - rows["y"]) ** 2)
        optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
        sums.assign_add(tf.reduce_sum(rows["x"], 0))
        return loss

    @function
    def one_step(iterator: Any) -> tf.Tensor:
        return step(next(iterator))

    @function
    def several_steps(iterator: Any) -> tf.Tensor:
        total = tf.constant(0.0, tf.float64)
        for _ in tf.range(3):
            total += step(iterator.get_next())
        return total

    optimizer.build(network.trainable_variables)
    return [one_step(data), several_steps(data), several_steps(data)], [sums.numpy(), *_values(network, optimizer)]


_ALL = (
    gan, penalized, replayed, physics, accumulated, variational, translated, captioned, compared, scaled, translated_pictures,
    cycled, acted, styled, federated, in_two_phases, in_epochs, in_steps,
)  # fmt: skip
PROGRAMS = {program.__name__: program for program in _ALL}


def ran(name: str, function: Decorator) -> list[np.ndarray]:
    """Returns what a program gives, with the same first values and random numbers each time."""
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        keras.utils.set_random_seed(3)
        losses, values = PROGRAMS[name](function)
        return [np.asarray(x) for x in tf.nest.flatten(losses)] + values
    finally:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(policy)
