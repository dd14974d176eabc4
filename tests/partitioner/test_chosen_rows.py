"""Rows that data choose: each replica computes with those that it has chosen of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import REPLICATE, Shard

_DRAWN = np.random.default_rng(0)
_X, _W = _DRAWN.normal(size=(7, 5, 3)), _DRAWN.normal(size=(3, 4))
_OF_WORDS, _OF_ROWS = _DRAWN.random((7, 5)) > 0.6, _DRAWN.random(7) > 0.5


def _with_gradients(loss: Callable[[Any, Any, Any], tf.Tensor]) -> Callable[[Any, Any, Any], list[tf.Tensor]]:
    def function(x: Any, mask: Any, w: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            value = loss(x, mask, w)
        of_rows, of_weights = tape.gradient(value, [x, w])
        return [value, tf.reduce_sum(of_rows * x, [0]), of_weights]

    return function


def _of_masked_words(x: Any, mask: Any, w: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.softmax(tf.boolean_mask(x, mask) @ w) ** 2)


def _of_places(x: Any, mask: Any, w: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.tanh(tf.gather_nd(x, tf.where(mask)) @ w))


def _reshaped(x: Any, mask: Any, w: Any) -> tf.Tensor:
    rows = tf.boolean_mask(x, mask)
    words = tf.reshape(rows, [-1, 3]) @ w
    return tf.reduce_mean(tf.tanh(tf.reshape(words, [tf.shape(rows)[0], -1])))


def _in_parts(x: Any, mask: Any, w: Any) -> list[tf.Tensor]:
    first, second = tf.dynamic_partition(x, tf.cast(mask, tf.int32), 2)
    return [tf.reduce_mean(first @ w), tf.reduce_sum(second**2), tf.shape(second)]


def _with_noise(x: Any, mask: Any, w: Any) -> list[tf.Tensor]:
    rows = tf.boolean_mask(x, mask)
    noisy = rows * tf.random.stateless_uniform(tf.shape(rows), [1, 2], dtype=rows.dtype)
    return [tf.reduce_sum(noisy, 0), tf.math.reduce_std(noisy @ w)]


# What is computed of chosen rows, the mask, and how often replicas gather: numbers of rows, and nothing else.
_PROGRAMS: dict[str, tuple[Callable[[Any, Any, Any], Any], np.ndarray, int]] = {
    "masked words": (_with_gradients(_of_masked_words), _OF_WORDS, 1),
    "places": (_with_gradients(_of_places), _OF_WORDS, 0),
    "reshaped": (_with_gradients(_reshaped), _OF_ROWS, 1),
    "none": (_with_gradients(_of_places), np.zeros_like(_OF_ROWS), 0),
    "parts": (_in_parts, _OF_ROWS, 2),
    "noise": (_with_noise, _OF_ROWS, 1),
}


@pytest.mark.parametrize("counts", [(4, 3), (3, 0, 4), (1, 6)], ids=str)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_replicas_go_on_with_their_own(name: str, counts: tuple[int, ...]) -> None:
    function, mask, gathers = _PROGRAMS[name]
    worst, step, transport = differences(function, [_X, mask, _W], [Shard(0), Shard(0), REPLICATE], counts)
    assert worst < 1e-12
    assert transport.gathers == gathers
    assert not step.without_rule


def _in_bodies(x: Any, mask: Any, w: Any) -> list[tf.Tensor]:
    rows = tf.boolean_mask(x, mask)
    branch = tf.cond(tf.reduce_sum(rows) > 0.0, lambda: rows * 2.0, lambda: rows)
    chosen_inside = tf.switch_case(tf.constant(0), [lambda: tf.boolean_mask(x, mask)])
    loop = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + tf.reduce_mean(rows)), (0, rows))[1]
    return [rows, branch, chosen_inside, loop, tf.map_fn(lambda row: row @ w, rows), tf.concat([rows, rows], 0)]


@pytest.mark.parametrize("counts", [(4, 3), (3, 0, 4)], ids=str)
def test_they_are_whole_in_bodies_and_results(counts: tuple[int, ...]) -> None:
    worst, _, _ = differences(_in_bodies, [_X, _OF_ROWS, _W], [Shard(0), Shard(0), REPLICATE], counts, in_function=True)
    assert worst < 1e-12
