"""Tolerances are computed: rounding is within them, and what is lost is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Shard
from tfrep_strategy.verification.comparison import Bounds, difference, disagreement, joined, nudged

pytestmark = pytest.mark.lane("quick")

_DRAWN = np.random.default_rng(0)
_DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64]


def _numbers(dtype: tf.DType, *shape: int) -> np.ndarray:
    return _DRAWN.normal(size=shape).astype(dtype.as_numpy_dtype)


def _bounds(function: Any, *inputs: np.ndarray, dtype: tf.DType, terms: float) -> Bounds:
    others = [function(*(nudged(x, dtype, _DRAWN) for x in inputs)) for _ in range(2)]
    return Bounds(function(*inputs), others, terms)


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: dtype.name)
def test_a_sum_in_another_order_is_rounding_and_a_lost_part_is_not(dtype: tf.DType) -> None:
    rows = _numbers(dtype, 2000)

    def total(x: np.ndarray) -> np.ndarray:
        return tf.reduce_sum(tf.constant(x, dtype)).numpy()

    parts = [total(rows[:700]), total(rows[700:])]
    bounds = _bounds(total, rows, dtype=dtype, terms=2000.0)
    whole = joined(PARTIAL, parts, tf.TensorShape([]))
    assert difference(PARTIAL, parts, whole, bounds, dtype) is None
    found = difference(REPLICATE, parts, parts[0], bounds, dtype)
    assert found is not None
    assert found.replica == 0
    assert found.found > found.tolerance


def test_what_cancels_out_has_a_tolerance_of_its_size() -> None:
    rows = np.float32([1e6, 0.1, -1e6]), np.float32([1.0, 2.0])
    right = np.float32(3.1)
    bounds = Bounds(right, [right], 1.0)
    addends = [np.float32(rows[0].sum()), np.float32(rows[1].sum())]
    large = [np.float32(1e6 + 3.0), np.float32(-1e6)]
    assert difference(PARTIAL, addends, np.float32(sum(addends)), bounds, tf.float32) is None
    assert difference(PARTIAL, large, np.float32(sum(large)), bounds, tf.float32) is None
    assert difference(REPLICATE, [np.float32(3.0)], np.float32(3.0), bounds, tf.float32) is not None


def test_the_replica_that_differs_is_named() -> None:
    right = _numbers(tf.float32, 5, 3)
    bounds = Bounds(right, [right], 1.0)
    parts = [right[:3], right[3:].copy()]
    assert difference(Shard(0), parts, right, bounds, tf.float32) is None
    parts[1][0, 0] += 1.0
    found = difference(Shard(0), parts, np.concatenate(parts), bounds, tf.float32)
    assert found is not None
    assert found.replica == 1
    assert found.found == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("own", "same"), [([np.nan, 1.0], True), ([0.0, 1.0], False), ([np.nan, np.nan], False), ([np.nan, np.inf], False)]
)
def test_what_is_no_number(own: list[float], same: bool) -> None:
    right = np.float32([np.nan, 1.0])
    value = np.float32(own)
    assert (difference(REPLICATE, [value], value, Bounds(right, [right], 1.0), tf.float32) is None) == same


@pytest.mark.parametrize("dtype", [np.int32, bool, object])
def test_what_is_not_floating_has_to_be_equal(dtype: type) -> None:
    right = np.array([1, 0, 1], dtype)
    other, tf_dtype = np.array([1, 1, 1], dtype), tf.string if dtype is object else tf.as_dtype(dtype)
    assert difference(REPLICATE, [right], right, Bounds(right, [right], 1.0), tf_dtype) is None
    assert difference(REPLICATE, [other], other, Bounds(right, [right], 1.0), tf_dtype) is not None
    assert difference(REPLICATE, [other], other, Bounds(right, [other], 1.0), tf_dtype) is None, "the last bits decide it"


def test_shapes() -> None:
    assert isinstance(joined(Shard(0), [np.zeros([2, 3]), np.zeros([1, 4])], tf.TensorShape(None)), str)
    assert isinstance(joined(Shard(3), [np.zeros([2])] * 2, tf.TensorShape(None)), str)
    assert isinstance(joined(Shard(1), [np.zeros([2, 3])] * 2, tf.TensorShape([4, 3])), str)
    right = np.zeros([2], np.float32)
    found = difference(REPLICATE, [right, right[:1]], right, Bounds(right, [right], 1.0), tf.float32)
    assert found is not None
    assert found.replica == 1


def test_what_nobody_can_repeat_is_alike_on_all_replicas() -> None:
    drawn = _numbers(tf.float32, 4)
    assert disagreement([drawn, drawn.copy()], tf.float32) is None
    found = disagreement([drawn, drawn, nudged(drawn, tf.float32, _DRAWN)], tf.float32)
    assert found is not None
    assert found.replica == 2
