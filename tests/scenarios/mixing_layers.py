"""Layers that mix the rows of a batch, in models with Keras's own step, and tables that are looked up with mixed rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from scenarios.base import dense, init, regression, scenario, trained

_O = keras.optimizers


class Router(layers.Layer):
    """Sends rows to two experts, each of which takes the first six that choose it (Fedus et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = layers.Dense(2, kernel_initializer=init(1))
        self.experts = [layers.Dense(4, "silu", kernel_initializer=init(seed)) for seed in (2, 3)]

    def build(self, shape: Any) -> None:
        for layer in (self.choose, *self.experts):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        chances = ops.softmax(self.choose(x))
        chosen = ops.one_hot(ops.argmax(chances, -1), 2)
        self.add_loss(0.1 * ops.sum(ops.mean(chosen, 0) * ops.mean(chances, 0)))
        weights = chances * chosen * ops.cast(ops.cumsum(chosen, 0) <= 6, "float32")
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Centered(layers.Layer):
    """Takes away the mean of the batch."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


@scenario
def layers_that_mix_rows() -> dict[str, Any]:
    inputs = keras.Input((4,))
    keys = layers.Dense(5, kernel_initializer=init(4))(inputs)
    attended = ops.matmul(ops.softmax(ops.matmul(keys, ops.transpose(keys))), inputs)
    ends = [layers.Dense(1, kernel_initializer=init(5)) for _ in range(3)]
    models = {
        "router": keras.Sequential([keras.Input((4,)), Router(), ends[0]]),
        "centered": keras.Sequential([keras.Input((4,)), Centered(), ends[1]]),
        "attention": keras.Model(inputs, ends[2](attended)),
    }
    for model in models.values():
        model.compile(_O.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return {name: trained(model, *regression(33), epochs=2) for name, model in models.items()}


class Tied(layers.Layer):
    """Multiplies by a matrix, and back by one that is made of it."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), initializer=init(6))

    def call(self, x: Any) -> Any:
        kernel = ops.convert_to_tensor(self.kernel)
        return ops.matmul(ops.tanh(ops.matmul(x, kernel)), ops.transpose(ops.normalize(kernel, axis=0)))


class MixedUp(keras.Sequential):
    """Trains on mixtures of rows (Zhang et al., 2018)."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = (0.7 * each + 0.3 * tf.reverse(each, [0]) for each in data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def _behind(make: type[keras.Sequential], *first: Any) -> keras.Model:
    statistics, end = layers.BatchNormalization(synchronized=True), layers.Dense(1, kernel_initializer=init(7))
    model = make([keras.Input((4,)), *first, Tied(), statistics, layers.Activation("tanh"), end])
    model.compile(_O.SGD(0.02, momentum=0.9), "mse")
    return model


@scenario
def mixed_rows_before_what_replicas_sum_up() -> dict[str, Any]:
    """The sums of synchronized batch normalization are of mixed rows, and one weight is computed from another."""
    mixed_up, behind_layer = _behind(MixedUp), _behind(keras.Sequential, Centered())
    return {"mixed up": trained(mixed_up, *regression(33), epochs=2), "layer": trained(behind_layer, *regression(33), epochs=2)}


@scenario
def loops_behind_mixed_rows() -> dict[str, Any]:
    """Nobody can repeat a loop with the rows of all replicas, so each process runs the step with them, and one device's dropout."""

    def net(make: type[keras.Sequential], *first: Any) -> keras.Model:
        ends = layers.BatchNormalization(), layers.Dropout(0.3, seed=9), layers.Dense(1, kernel_initializer=init(9))
        model = make([keras.Input((4,)), *first, layers.Reshape((2, 2)), layers.GRU(3, kernel_initializer=init(10)), *ends])
        metrics = ["mae", keras.metrics.RootMeanSquaredError()] if make is keras.Sequential else None
        model.compile(_O.Adam(0.02, epsilon=1e-3), "mse", metrics=metrics)
        return model

    rows = regression(33)
    behind_layer = net(keras.Sequential, Centered())
    results = {"mixed up": trained(net(MixedUp), *rows, epochs=2)}
    results["layer"] = trained(behind_layer, *rows, epochs=2, sample_weight=np.arange(33) / 33)
    return results | {"of one batch": behind_layer.train_on_batch(rows[0][:7], rows[1][:7])}


class NormalizedCell(layers.SimpleRNNCell):
    """Normalizes over the batch in each turn of a loop."""

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        output, _ = super().call(x, states, training=training)
        output = (output - ops.mean(output, axis=0)) / (ops.std(output, axis=0) + 0.1)
        return output, [output]


class Assigned(keras.Sequential):
    """Assigns rows to clusters of one size in turns (Caron et al., 2020), and adds up errors in a loop."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data

        def turn(i: Any, chances: Any) -> Any:
            chances = chances / ops.sum(chances, axis=0, keepdims=True)
            return chances / ops.sum(chances, axis=1, keepdims=True)

        with tf.GradientTape() as tape:
            scores = self(x, training=True)
            assigned = ops.fori_loop(0, 3, turn, ops.exp(scores))
            loss = ops.mean((ops.sum(assigned * scores, axis=1, keepdims=True) - y) ** 2)
            loss += ops.fori_loop(0, 3, lambda i, total: total + 0.01 * ops.sum(scores**2), ops.zeros(()))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@scenario
def rows_mixed_in_loops() -> dict[str, Any]:
    """Loops show in their own graphs that they mix rows."""
    normalized = layers.RNN(NormalizedCell(3, kernel_initializer=init(11), recurrent_initializer=init(12)))
    behind = keras.Sequential([keras.Input((4,)), layers.Reshape((2, 2)), normalized, layers.Dense(1, kernel_initializer=init(13))])
    behind.compile(_O.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    assigned = Assigned([keras.Input((4,)), layers.Dense(3, kernel_initializer=init(14))])
    assigned.compile(_O.SGD(0.05))
    history = assigned.fit(*regression(33), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"cell": trained(behind, *regression(33), epochs=2), "history": history, "weights": assigned.get_weights()}


@tf.custom_gradient
def _clipped_on_the_way_back(x: Any) -> Any:
    return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 0.02)


class Denoiser(keras.Sequential):
    """Adds numbers that follow from the step, and applies a gradient without a tape: along one direction (Baydin et al., 2022)."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        noise = tf.random.stateless_normal(tf.shape(x), [tf.cast(self.optimizer.iterations, tf.int32), 3])
        variables = [variable.value for variable in self.trainable_variables]
        directions = [tf.cos(tf.range(tf.size(variable), dtype=tf.float32)) for variable in variables]
        directions = [tf.reshape(each, variable.shape) for each, variable in zip(directions, variables, strict=True)]
        with tf.autodiff.ForwardAccumulator(variables, directions) as accumulator:
            loss = tf.reduce_mean((self(x + noise, training=True) - y) ** 2)
        slope = accumulator.jvp(loss)
        gradients = [tf.clip_by_norm(slope * each, 0.5) for each in directions]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "slope": slope}


class Slope(keras.Sequential):
    """Computes a gradient by a formula."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        errors = self(x, training=True) - y
        by_kernel = ops.matmul(ops.transpose(x), errors) / ops.sqrt(ops.sum(errors**2))
        self.optimizer.apply([0.1 * by_kernel, ops.mean(errors, axis=0)], self.trainable_variables)
        return {"loss": ops.mean(errors**2), "large": tf.sparse.reduce_sum(tf.sparse.from_dense(ops.relu(errors)))}


@scenario
def gradients_without_a_tape_and_mixed_on_the_way_back() -> dict[str, Any]:
    clipped = [layers.Dense(4, kernel_initializer=init(15)), layers.Lambda(_clipped_on_the_way_back), layers.Dense(1)]
    models = {
        "clipped": keras.Sequential([keras.Input((4,)), *clipped]),
        "denoiser": Denoiser([keras.Input((4,)), layers.Dense(3, "tanh", kernel_initializer=init(16)), layers.Dense(1)]),
        "slope": Slope([keras.Input((4,)), layers.Dense(1, kernel_initializer=init(17))]),
    }
    results = {}
    for name, model in models.items():
        model.compile(_O.SGD(0.05), "mse")
        history = model.fit(*regression(33), batch_size=16, epochs=2, shuffle=False, verbose=0).history
        results[name] = {"history": history, "weights": model.get_weights()}
    return results


class ByMixedRows(keras.Model):
    """Differentiates by mixtures of rows (Gulrajani et al., 2017) and by rows of a buffer that are taken by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.samples = self.add_weight(shape=(40, 4), initializer=init(8), trainable=False)

    def moved(self, rows: Any, size: float) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            energies = self.net(rows)
        return tf.stop_gradient(rows - size * tape.gradient(energies, rows))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        sampled = self.moved(tf.gather(self.samples, tf.range(tf.shape(x)[0])), 0.1)
        mixed = 0.5 * x + 0.5 * tf.reverse(x, [0])
        attacked = self.moved(mixed, -0.2)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                scores = self.net(mixed)
            norms = tf.norm(inner.gradient(scores, mixed) + 1e-3, axis=1)
            loss = tf.reduce_mean((norms - 1) ** 2) + tf.reduce_mean((self.net(attacked) - y) ** 2)
            loss += tf.reduce_mean(tf.tanh(self.net(sampled)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": tf.reduce_mean(norms)}


@scenario
def gradients_by_mixed_rows() -> dict[str, Any]:
    model = ByMixedRows()
    model.compile(_O.SGD(0.05))
    history = model.fit(*regression(33), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


class Negatives(keras.Model):
    """Compares rows of a table with those of the next example, and with some that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(20, 4, embeddings_initializer=init(1))
        self.table.build(None)

    def train_step(self, rows: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            number = tf.shape(rows)[0]
            found = self.table(tf.concat([rows, tf.constant([1, 4, 7], rows.dtype)], 0))
            shared = tf.matmul(found[:number], found[number:], transpose_b=True)
            beside = tf.reduce_sum(self.table(rows) * self.table(tf.roll(rows, 1, 0)), -1)
            loss = tf.reduce_mean(tf.nn.softplus(shared)) + tf.reduce_mean(tf.nn.softplus(beside))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "is_sparse": tf.constant(float(isinstance(gradients[0], tf.IndexedSlices)))}


class Biases(layers.Layer):
    """Looks up a table with rows that a variable holds, as the relative positions of a Swin transformer (Liu et al., 2021)."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(3, 4), initializer=init(2))
        self.places = keras.Variable([0, 1, 1, 2], trainable=False, dtype="int32")

    def call(self, x: Any) -> Any:
        return x * ops.sum(ops.tanh(ops.take(self.table, self.places, axis=0)), 0)


@scenario
def tables_looked_up_with_all_rows_and_by_variables() -> dict[str, Any]:
    """Adam squares each slice of a gradient."""
    negatives = Negatives()
    negatives.compile(_O.Adam(0.05, epsilon=1e-3))
    history = negatives.fit(np.arange(17) * 3 % 20, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    biased = keras.Sequential([keras.Input((4,)), Biases(), layers.Dense(1, kernel_initializer=init(3))])
    biased.compile(_O.Adam(0.05, epsilon=1e-3), "mse")
    return {"negatives": [history, negatives.get_weights()], "biased": trained(biased, *regression(17), batch_size=5, epochs=2)}
