"""What is cut beside the batch: the planner divides work that every replica would do alike, where that costs less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import Shard

_DRAW = np.random.default_rng(0)
_FIRST, _SECOND = tf.Variable(_DRAW.normal(size=(6, 20))), tf.Variable(_DRAW.normal(size=(20, 4)))
_LARGE = tf.Variable(_DRAW.normal(size=(64, 256)))
_GRID = tf.constant(np.linspace(-1.0, 1.0, 48 * 6).reshape(48, 6))
_COUNTS = [(3, 2), (2, 2, 1), (5, 0)]


def _noise(rows: int) -> tf.Tensor:
    return tf.random.stateless_normal([rows, 6], [1, 2], dtype=tf.float64)


def _gradients(rows: tf.Tensor, batch: tf.Tensor) -> list[tf.Tensor]:
    """A loss of rows that do not come from the batch, and of the batch."""
    with tf.GradientTape() as tape:
        made = tf.nn.softplus(rows @ _FIRST) @ _SECOND
        told = tf.ones_like(made[:, :1]) * 0.5
        loss = tf.reduce_mean((made - told) ** 2) + tf.reduce_mean(tf.nn.softplus(batch @ tf.transpose(_SECOND)))
    return [loss, *tape.gradient(loss, [_FIRST, _SECOND])]


def _of_noise(batch: tf.Tensor) -> list[tf.Tensor]:
    return _gradients(_noise(48), batch)


def _of_a_grid(batch: tf.Tensor) -> list[tf.Tensor]:
    return _gradients(_GRID, batch)


def _of_both(batch: tf.Tensor) -> list[tf.Tensor]:
    """Two sets of rows beside the batch, which meet."""
    noise = _noise(41)
    return [*_gradients(noise, batch), *_gradients(_GRID, batch), tf.reduce_sum(tf.concat([noise, _GRID], 0), 0)]


_TOLD = {_of_noise: "48 rows", _of_a_grid: "48 rows", _of_both: "48 or 41 rows"}


@pytest.mark.parametrize("counts", _COUNTS, ids=str)
@pytest.mark.parametrize("is_open", [True, False], ids=["any number of rows", "a number of rows"])
@pytest.mark.parametrize("function", _TOLD)
def test_rows_beside_the_batch(function: Any, is_open: bool, counts: tuple[int, ...]) -> None:
    worst, step, _ = differences(function, [_DRAW.normal(size=(5, 4))], [Shard(0)], counts, is_open)
    assert worst < 1e-13
    assert f"Cut beside the batch: what has {_TOLD[function]}." in step.describe()


def test_what_would_cost_more_is_not_cut() -> None:
    """Few rows of noise, and large weights, whose gradients would have to be sent."""

    def function(batch: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            noise = tf.random.stateless_normal([4, 64], [1, 2], dtype=tf.float64)
            loss = tf.reduce_mean(tf.nn.softplus(noise @ _LARGE))
        return [tape.gradient(loss, _LARGE), tf.reduce_sum(batch)]

    worst, step, _ = differences(function, [_DRAW.normal(size=(5, 4))], [Shard(0)], (3, 2))
    assert worst < 1e-13
    assert not [line for line in step.describe() if "beside" in line]


def test_noise_of_the_weights_is_not_cut() -> None:
    """A number of rows that is the width of a layer: nothing is gained by cutting the weights that it is added to."""

    def function(batch: tf.Tensor) -> list[tf.Tensor]:
        noisy = _FIRST + tf.random.stateless_normal([6, 20], [1, 2], dtype=tf.float64)
        return [tf.reduce_mean(tf.nn.softplus(batch @ noisy))]

    worst, step, _ = differences(function, [_DRAW.normal(size=(50, 6))], [Shard(0)], (26, 24))
    assert worst < 1e-13
    assert not [line for line in step.describe() if "beside" in line]
