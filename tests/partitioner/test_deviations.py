"""The mean and the variance of a batch cost one round of collectives, and lose no digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import Shard

pytestmark = pytest.mark.lane("quick")

_FAR = 1000.0
"""How far rows are from zero. The squares of such numbers have no digits left for their variance in 32 bits."""


def _masked(x: Any, mask: Any) -> list[Any]:
    """The moments of what a mask leaves, as Keras's `BatchNormalization` computes them."""
    mask = tf.broadcast_to(mask[:, :, None], tf.shape(x))
    count = tf.reduce_sum(tf.cast(mask, tf.float32), [0, 1], keepdims=True) + 1e-7
    mean = tf.reduce_sum(tf.where(mask, x, 0.0), [0, 1], keepdims=True) / count
    variance = tf.reduce_sum(tf.square(tf.where(mask, x - mean, 0.0)), [0, 1], keepdims=True) / count
    return [mean, variance]


def _of_channels(x: Any, mask: Any) -> Any:
    return tf.nn.moments(x, [0, 1])


def _of_all(x: Any, mask: Any) -> Any:
    return tf.math.reduce_std(x)


def _from_a_given_value(x: Any, mask: Any) -> Any:
    """The deviations from another value than the mean, which the replicas have to find, too."""
    return tf.reduce_sum(tf.math.squared_difference(x, tf.reduce_sum(x, [0, 1], keepdims=True) / 7.0), [0, 1])


@pytest.mark.parametrize("counts", [(4, 3), (7, 0), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("function", [_masked, _of_channels, _of_all, _from_a_given_value])
def test_one_round_and_every_digit(function: Callable[..., Any], counts: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    rows, mask = draw.normal(size=(7, 5, 3)).astype("float32") + np.float32(_FAR), draw.uniform(size=(7, 5)) > 0.4
    worst, _, transport = differences(function, [rows, mask], [Shard(0)] * 2, counts, in_function=True)
    assert worst < 1e-6
    assert (transport.rounds, transport.gathers) == (1, 0)


def test_another_center_for_each_row() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")

    def function(x: Any) -> Any:
        centers = tf.reduce_sum(x) * tf.range(7.0)[:, None]
        return tf.reduce_sum(tf.math.squared_difference(x, centers), 0)

    worst, *_ = differences(function, [rows], [Shard(0)], (4, 3), in_function=True)
    assert worst < 1e-5
