"""Which functions keep rows apart, and that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.data.pipeline_functions import operation_that_mixes_rows

_TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)
_CONSTANT = tf.constant([[1.0, 2.0, 3.0]])
_WEIGHTS = tf.constant([0.1, 0.2, 0.3, 0.4, 0.5])
_MATRIX = tf.reshape(tf.range(18.0), [6, 3])


def with_a_fixed_size(value: tf.Tensor) -> tf.Tensor:
    value.set_shape([6, 3])
    return value * 2.0


BY_ROWS: list[tuple[Callable[..., Any], Any]] = [
    (lambda v: v / 255.0, _MATRIX),
    (lambda v: tf.clip_by_value(v, 1.0, 9.0) - _CONSTANT, _MATRIX),
    (lambda v: tf.where(v > 4.0, v, tf.zeros_like(v)), _MATRIX),
    (lambda v: (v[..., 0], v[:, 1:], v[..., tf.newaxis]), _MATRIX),
    (lambda v: (v[..., 1:, :], v[..., tf.newaxis, ::-1]), _MATRIX[..., tf.newaxis]),
    (lambda v: tf.transpose(tf.reshape(v, [-1, 3, 1]), [0, 2, 1]), _MATRIX),
    (lambda v: tf.concat([v, v * 2.0], -1), _MATRIX),
    (lambda v: tf.stack([v, v], 1), _MATRIX),
    (lambda v: tf.squeeze(tf.expand_dims(v, 2), axis=[2]), _MATRIX),
    (lambda v: (tf.argmax(v, -1), tf.reduce_max(v, 1), tf.reduce_any(v > 3.0, axis=-1)), _MATRIX),
    (lambda v: {"x": tf.one_hot(tf.cast(v[:, 0], tf.int32), 20), "one": 1.0}, _MATRIX),
    (lambda v: tf.gather(_WEIGHTS, v % 5), tf.range(6)),
    (lambda v: tf.strings.to_number(tf.strings.regex_replace(v, "[a-z]", "")), tf.constant(["a1", "b2", "3", "4", "5", "6"])),
    (lambda v: tf.reshape(tf.reshape(v, [-1]), [-1, 3]), _MATRIX),
    (lambda v: tf.reshape(v, [tf.shape(v)[0], 1, 3]) + tf.zeros([tf.shape(v)[0], 1, 3]), _MATRIX),
    (lambda v: (*tf.split(v, 3, 1), *tf.unstack(v, axis=1), tf.tile(v, [1, 2]), tf.reverse(v, [1])), _MATRIX),
    (lambda v: tf.strings.regex_full_match(v, "[a-z]"), tf.constant(["a", "b2", "3", "c", "5", "6"])),
    (lambda v: _TABLE.lookup(tf.strings.lower(v)), tf.constant(["A", "b", "c", "a", "B", "a"])),
]
MIXED: list[tuple[Callable[..., Any], Any]] = [
    (lambda v: v - tf.reduce_mean(v), _MATRIX),
    (lambda v: v[::-1], _MATRIX),
    (lambda v: v[1:], _MATRIX),
    (lambda v: v[0], _MATRIX),
    (lambda v: v[..., ::-1, :], _MATRIX),
    (lambda v: v[..., :2], _WEIGHTS),
    (lambda v: v[..., 1:, tf.newaxis], _WEIGHTS),
    (lambda v: tf.ensure_shape(v, [6, 3]) * 2.0, _MATRIX),
    (with_a_fixed_size, _MATRIX),
    (lambda v: 1.0, _MATRIX),
    (lambda v: tf.transpose(v), _MATRIX),
    (lambda v: tf.reshape(v, [-1, 9]), _MATRIX),
    (lambda v: tf.reshape(v, [-1]), _MATRIX),
    (lambda v: v + tf.cast(tf.range(tf.shape(v)[0]), tf.float32)[:, None], _MATRIX),
    (lambda v: tf.concat([v, v], 0), _MATRIX),
    (lambda v: tf.reduce_max(v, 0), _MATRIX),
    (lambda v: v[:, 0] + v, _MATRIX[:3]),
    (lambda v: tf.gather(v, [1, 0, 2]), _MATRIX),
    (lambda v: _MATRIX, _MATRIX),
    (lambda v: tf.exp(v), _MATRIX),
    (lambda v: tf.reshape(v, [tf.shape(v)[0], -1]), _MATRIX[..., tf.newaxis]),
    (lambda v: v * tf.cast(tf.shape(v)[0], tf.float32), _MATRIX),
    (lambda v: (v, tf.shape(v)[0]), _MATRIX),
    (lambda v: tf.sort(v, 0), _MATRIX),
    (lambda v: tf.cond(tf.shape(v)[0] > 2, lambda: v, lambda: v * 2.0), _MATRIX),
]


def traced(function: Callable[..., Any], value: tf.Tensor) -> Any:
    """Returns the function as `tf.data` traces it for batches of any size."""
    return tf.function(function, [tf.TensorSpec([None, *value.shape[1:]], value.dtype)], autograph=False).get_concrete_function()


@pytest.mark.parametrize(("function", "value"), BY_ROWS)
def test_rows_that_are_known_to_be_apart_are(function: Any, value: tf.Tensor) -> None:
    concrete = traced(function, value)
    assert operation_that_mixes_rows(concrete, [True]) is None
    whole = tf.nest.flatten(concrete(value))
    parts = [tf.nest.flatten(concrete(value[start:stop])) for start, stop in ((0, 1), (1, 4), (4, 4), (4, 6))]
    for i, expected in enumerate(whole):
        if expected.shape.rank:
            np.testing.assert_array_equal(tf.concat([part[i] for part in parts], 0), expected)


@pytest.mark.parametrize(("function", "value"), MIXED)
def test_what_mixes_rows_or_may_round_otherwise_is_named(function: Any, value: tf.Tensor) -> None:
    assert operation_that_mixes_rows(traced(function, value), [True])


def test_arguments_that_every_step_gets_alike() -> None:
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 3])]
    picks = tf.function(lambda indices, data: tf.gather(data, indices), signature).get_concrete_function()
    assert operation_that_mixes_rows(picks, [True, False]) is None
    assert operation_that_mixes_rows(picks, [False, True]) == "GatherV2"
    assert operation_that_mixes_rows(picks, [True, True]) == "GatherV2"
