"""State that layers and steps of the user's own assign from the rows of a batch; of the last batch one replica has none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from scenarios.base import dense, init, regression, scenario, trained

_O = keras.optimizers


class Whitened(layers.Layer):
    """Subtracts a moving average of its own, and divides by the root of one of squares, of means and of the largest value."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")
        self.square = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False, name="square")
        self.sums = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="sums")
        self.largest = keras.Variable(np.ones(shape[-1]), trainable=False, name="largest")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            mean = ops.mean(x, axis=0)
            self.average.assign(0.9 * self.average + 0.1 * mean)
            self.square.assign(0.9 * self.square + 0.1 * (ops.mean(ops.square(x), axis=0) - ops.square(mean)))
            self.sums.value.assign_add(ops.sum(x, axis=0))
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x), axis=0)))
        return (x - self.average) / ops.sqrt(self.square + 1e-3) / self.largest


class Counting(layers.Layer):
    """Counts rows in variables that ask for sums."""

    def build(self, shape: Any) -> None:
        made = {"shape": (), "initializer": "zeros", "trainable": False, "aggregation": "sum"}
        self.rows = self.add_weight(dtype="int64", name="rows", **made)
        self.left = keras.Variable(100.0, trainable=False, aggregation="sum", name="left")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
            self.left.assign_sub(ops.sum(ops.ones_like(x[:, 0])))
        return x


@scenario
def counts_that_replicas_add_up() -> dict[str, Any]:
    counting = Counting()
    model = keras.Sequential([keras.Input((4,)), counting, layers.Dense(1, kernel_initializer=init(1))])
    model.compile(_O.SGD(0.05), "mse")
    found = trained(model, *regression(33))
    return found | {"rows": ops.convert_to_numpy(counting.rows), "left": ops.convert_to_numpy(counting.left)}


@scenario
def moving_averages_of_rows() -> dict[str, Any]:
    whitened = Whitened()
    model = keras.Sequential([keras.Input((4,)), whitened, layers.Dense(1, kernel_initializer=init(1))])
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression(33)) | {"largest": ops.convert_to_numpy(whitened.largest)}


class Codebook(layers.Layer):
    """A vector quantizer whose codes follow moving averages of sums over rows (van den Oord et al., 2017, appendix A.1)."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(3, 5), initializer=init(3), trainable=False, name="codes")
        self.sums = self.add_weight(shape=(3, 5), initializer=init(3), trainable=False, name="sums")
        self.sizes = self.add_weight(shape=(5,), initializer="ones", trainable=False, name="sizes")
        self.chosen = self.add_weight(shape=(5,), initializer="zeros", trainable=False, dtype="int32", name="chosen")
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="rows")

    def call(self, x: Any, training: bool = False) -> Any:
        flat = ops.reshape(x, (-1, 3))
        distances = ops.sum(ops.square(self.codes), 0) - 2.0 * ops.matmul(flat, self.codes)
        nearest = ops.one_hot(ops.argmin(distances, 1), 5)
        if training:
            self.sizes.assign(0.9 * self.sizes + 0.1 * ops.sum(nearest, 0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(flat), nearest))
            self.codes.assign(self.sums / self.sizes)
            self.chosen.assign_add(ops.sum(ops.cast(nearest, "int32"), 0))
            self.rows.assign_add(ops.shape(x)[0])
        quantized = ops.reshape(ops.matmul(nearest, ops.transpose(self.codes)), ops.shape(x))
        self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(quantized) - x)))
        return x + ops.stop_gradient(quantized - x)


@scenario
def codebook_of_moving_averages() -> dict[str, Any]:
    x = np.random.RandomState(0).randn(17, 4, 3).astype("float32")
    ends = [layers.Dense(3, kernel_initializer=init(seed)) for seed in (1, 2)]
    model = keras.Sequential([keras.Input((4, 3)), ends[0], Codebook(), ends[1]])
    model.compile(_O.SGD(0.1), "mse", jit_compile=False)  # On a GPU, Keras has no int32 variables in XLA.
    return trained(model, x, x, batch_size=8)


class Assigning(keras.Model):
    """Keeps state of every kind, some of it in variables that Keras does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.warmth = self.add_weight(shape=(), initializer="ones", name="warmth")
        self.average = keras.Variable(0.0, trainable=False, name="average")
        self.total = keras.Variable(0.0, trainable=False, aggregation="mean", name="total")
        self.centers = tf.Variable(tf.zeros([3, 2]), trainable=False)
        self.rows = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.lengths = tf.Variable(tf.zeros([4]), trainable=False)

    def call(self, x: Any) -> Any:
        return self.warmth * self.net(x)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        *gradients, of_warmth = tape.gradient(loss, [*self.net.trainable_variables, self.warmth])
        self.optimizer.apply(gradients, self.net.trainable_variables)
        self.warmth.assign_sub(0.1 * of_warmth)
        self.average.assign(0.9 * self.average + 0.1 * loss)
        self.total.assign_add(tf.reduce_sum(x))
        kinds = tf.cast(x[:, 0] > 0, tf.int32) + tf.cast(x[:, 1] > 0, tf.int32)
        self.centers.assign_sub(0.1 * tf.math.unsorted_segment_sum(tf.gather(self.centers, kinds) - x[:, :2], kinds, 3))
        self.rows.assign_add(tf.shape(x, tf.int64)[0])
        self.lengths.assign(tf.sqrt(tf.einsum("bi,bi->i", x, x)) + tf.cast(tf.shape(x)[1], tf.float32))
        return {"loss": loss, "average": self.average.value, "mean": self.total / tf.cast(self.rows, tf.float32)}


@scenario
def state_that_a_step_assigns() -> dict[str, Any]:
    model = Assigning()
    x, y = regression(33)
    model(x[:1])
    model.compile(_O.SGD(0.05), "mse")
    kept = [model.average, model.total, model.centers, model.rows, model.lengths]
    return trained(model, x, y) | {"kept": [ops.convert_to_numpy(variable) for variable in kept]}


def beside_the_scope(value: Any) -> tf.Variable:
    """Makes a variable as a script does before it opens the scope, of which another thread knows nothing."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(tf.Variable, value, trainable=False).result()


@scenario
def variables_beside_the_scope() -> dict[str, Any]:
    """A count of steps, on which a step depends, the largest loss, and a moving average of the rows."""
    steps, largest, average = beside_the_scope(0), beside_the_scope(0.0), beside_the_scope([0.0] * 4)

    class Net(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            step = steps.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x - average, training=True) - y))
            weight = tf.cond(steps % 2 == 0, lambda: 1.0, lambda: 0.5)
            gradients = [weight * each for each in tape.gradient(loss, self.trainable_variables)]
            self.optimizer.apply(gradients, self.trainable_variables)
            largest.assign(tf.maximum(largest, loss))
            average.assign_sub(0.1 * (average - tf.reduce_mean(x, 0)))
            return {"loss": loss, "step": tf.cast(step, tf.float32)}

    inputs = keras.Input((4,))
    model = Net(inputs, dense()(inputs))
    model.compile(_O.SGD(0.1))
    x, y = regression(33)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    return {"weights": model.get_weights(), "history": history, "state": [each.numpy() for each in (steps, largest, average)]}
