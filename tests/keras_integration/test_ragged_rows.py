"""Steps of one's own that compute with ragged tensors: where rows begin and end is each replica's own, their lengths are rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane, others_in_lane

import tfrep_strategy as tfrep

_ROWS = 21
_RAGGED = tf.ragged.constant([[0.1 * i] * (i % 4) for i in range(_ROWS)], dtype=tf.float32)
_DEEP = tf.ragged.constant([[[0.1 * j] * (1 + j % 2) for j in range(i % 3)] for i in range(_ROWS)], dtype=tf.float32)

Features = Callable[[tf.RaggedTensor, tf.RaggedTensor, tf.Variable], tf.Tensor]


def _as_float(numbers: tf.Tensor) -> tf.Tensor:
    return tf.cast(numbers, tf.float32)


def _looked_up(rows: tf.RaggedTensor, table: tf.Variable) -> tf.RaggedTensor:
    tokens = rows.with_flat_values(tf.cast(rows.flat_values * 10, tf.int32) % 5)
    return tf.ragged.map_flat_values(lambda each: tf.gather(table, each)[:, 0], tokens)


# What is computed for each row from a ragged tensor, one with two ragged dimensions, and a table of weights.
COMPUTED: dict[str, Features] = {
    "largest": lambda rows, deep, table: tf.maximum(tf.reduce_max(rows, 1), -1.0),
    "means": lambda rows, deep, table: tf.math.divide_no_nan(tf.reduce_sum(rows, 1), _as_float(rows.row_lengths())),
    "dense": lambda rows, deep, table: tf.reduce_sum(rows.to_tensor(), 1),
    "masked": lambda rows, deep, table: tf.reduce_sum(tf.ragged.boolean_mask(rows, rows > 0.5), 1),
    "lengths after a mask": lambda rows, deep, table: _as_float(tf.ragged.boolean_mask(rows, rows > 0.5).row_lengths()),
    "sums of sums": lambda rows, deep, table: tf.reduce_sum(tf.reduce_sum(deep, 2), 1),
    "lengths of rows of rows": lambda rows, deep, table: _as_float(tf.reduce_sum(deep.row_lengths(axis=2), 1)),
    "merged dimensions": lambda rows, deep, table: _as_float(deep.merge_dims(1, 2).row_lengths()),
    "joined": lambda rows, deep, table: tf.reduce_sum(tf.concat([rows, rows * 2], 1), 1),
    "lengths of joined": lambda rows, deep, table: _as_float(tf.concat([rows, rows * 2], 1).row_lengths()),
    "first elements": lambda rows, deep, table: tf.reduce_sum(rows[:, :2], 1),
    "how many of the first": lambda rows, deep, table: _as_float(rows[:, :2].row_lengths()),
    "limits and starts": lambda rows, deep, table: _as_float(rows.row_limits() - rows.row_starts()),
    "ids of rows": lambda rows, deep, table: tf.math.unsorted_segment_sum(rows.flat_values, rows.value_rowids(), rows.nrows()),
    "times sums": lambda rows, deep, table: tf.reduce_sum(rows * tf.expand_dims(tf.reduce_sum(rows, 1), 1), 1),
    "longest row of all": lambda rows, deep, table: tf.reduce_sum(rows, 1) / (1 + _as_float(tf.reduce_max(rows.row_lengths()))),
    "mean of all": lambda rows, deep, table: tf.reduce_sum(rows, 1) / (1 + tf.reduce_mean(rows)),
    "sorted lengths": lambda rows, deep, table: _as_float(tf.sort(rows.row_lengths())),
    "kinds of lengths": lambda rows, deep, table: tf.reduce_sum(rows, 1) / _as_float(tf.size(tf.unique(rows.row_lengths()).y)),
    "sums of a table": lambda rows, deep, table: tf.reduce_sum(_looked_up(rows, table), 1),
    "means of a table": lambda rows, deep, table: tf.math.divide_no_nan(
        tf.reduce_sum(_looked_up(rows, table), 1), _as_float(rows.row_lengths())
    ),
    "first of a table": lambda rows, deep, table: tf.reduce_sum(_looked_up(rows, table)[:, :2], 1),
}


# How the errors of rows are put together.
LOSSES: dict[str, Callable[[tf.Tensor, tf.RaggedTensor, tf.Tensor], tf.Tensor]] = {
    "mean": lambda errors, rows, target: tf.reduce_mean(errors),
    "chosen by a mask": lambda errors, rows, target: tf.reduce_mean(tf.boolean_mask(errors, target > 0)),
    "by the number of rows": lambda errors, rows, target: tf.reduce_sum(errors) / _as_float(rows.nrows()),
}


class OfRaggedRows(keras.Model):
    """Learns from what is computed of ragged rows."""

    def __init__(self, features: Features, loss: str) -> None:
        super().__init__()
        self.features, self.put_together = features, LOSSES[loss]
        self.out = keras.layers.Dense(1, kernel_initializer="ones")
        self.out.build((None, 2))
        uniform = keras.initializers.RandomUniform(-0.5, 0.5, seed=3)
        self.table = self.add_weight(shape=(5, 1), initializer=uniform, name="table")

    def train_step(self, batch: Any) -> Any:
        rows, deep, target = batch
        with tf.GradientTape() as tape:
            computed = self.features(rows, deep, self.table)
            errors = tf.square(self.out(tf.stack([computed, tf.reduce_sum(rows, 1)], 1)) - target)
            loss = self.put_together(errors, rows, target)
        pairs = zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])
        return {"loss": loss, "computed": tf.reduce_mean(computed)}


def _trained(strategy: Any, features: Features, loss: str, jit_compile: bool = False) -> list[Any]:
    target = tf.random.stateless_normal([_ROWS, 1], [1, 2])
    data = tf.data.Dataset.from_tensor_slices((_RAGGED, _DEEP, target)).batch(8)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = OfRaggedRows(features, loss)
        model.compile(keras.optimizers.SGD(0.01), jit_compile=jit_compile)
    history = model.fit(data, epochs=2, verbose=0).history
    return [history["loss"], history["computed"], *model.get_weights()]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", others_in_lane("ragged", COMPUTED, "merged dimensions", "joined"))
def test_two_replicas(name: str, loss: str) -> None:
    found = _trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), COMPUTED[name], loss)
    for value, expected in zip(found, _trained(None, COMPUTED[name], loss), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["masked", *in_lane("ragged", "kinds of lengths", "sums of a table")])
def test_xla_and_what_values_decide_the_shape_of(name: str) -> None:
    """XLA would compute with the largest possible shapes: it failed here, "Shapes must match"."""
    found = _trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), COMPUTED[name], "chosen by a mask", jit_compile=True)
    for value, expected in zip(found, _trained(None, COMPUTED[name], "chosen by a mask"), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
