"""Loops as people write them for one device: each returns its losses, and all variables at the end.

They compute in 64 bits. Kinks and Adam would amplify what replicas round otherwise.
"""

from __future__ import annotations

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


_ALL = (gan, penalized, replayed, physics, accumulated, variational, translated, captioned, compared, scaled)
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
