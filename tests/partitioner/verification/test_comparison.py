"""Tolerances are computed: rounding is within them, and what is lost is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Shard
from tfrep_strategy.partitioner.verification.comparison import (
    Bounds,
    as_array,
    difference,
    disagreement,
    joined,
    nudged,
    shape_problem,
)

pytestmark = pytest.mark.lane("quick")

_DRAWN = np.random.default_rng(0)
_DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64]


def _numbers(dtype: tf.DType, *shape: int) -> np.ndarray:
    return _DRAWN.normal(size=shape).astype(dtype.as_numpy_dtype)


def _bounds(function: Any, given: np.ndarray, terms: float) -> Bounds:
    return Bounds(function(given), lambda times: [function(nudged(tf.constant(given))) for _ in range(times)], terms)


def _exact(right: np.ndarray) -> Bounds:
    return Bounds(right, lambda _: [right], 1.0)


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: dtype.name)
def test_a_sum_in_another_order_is_rounding_and_a_lost_part_is_not(dtype: tf.DType) -> None:
    rows = _numbers(dtype, 2000)

    def total(x: np.ndarray) -> np.ndarray:
        return as_array(tf.reduce_sum(tf.constant(x, dtype)))

    parts = [total(rows[:700]), total(rows[700:])]
    bounds = _bounds(total, rows, 2000.0)
    whole = as_array(joined(PARTIAL, list(map(tf.constant, parts))))
    assert difference(PARTIAL, parts, whole, bounds, dtype) is None
    found = difference(REPLICATE, parts, parts[0], bounds, dtype)
    assert found is not None
    assert found.replica == 0
    assert found.found > found.tolerance


def test_what_cancels_out_has_a_tolerance_of_its_size() -> None:
    bounds = _exact(np.float32(3.1))
    large = [np.float32(1e6 + 3.0), np.float32(-1e6)]
    assert difference(PARTIAL, large, np.float32(sum(large)), bounds, tf.float32) is None
    assert difference(REPLICATE, [np.float32(3.0)], np.float32(3.0), bounds, tf.float32) is not None


def test_the_replica_that_differs_is_named() -> None:
    right = _numbers(tf.float32, 5, 3)
    bounds = _exact(right)
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
    assert (difference(REPLICATE, [value], value, _exact(right), tf.float32) is None) == same


def test_a_sum_that_comes_out_the_same_twice_by_chance() -> None:
    """Numbers that cancel: few sums are possible, and the first changes of their last bits may give the same one."""
    right, asked = np.float32([2.0**-27]), list[int]()

    def perturbed(times: int) -> list[np.ndarray]:
        asked.append(times)
        return [right] * 2 + [right + np.float32(2.0**-30)] * (times - 2)

    near, far = right + np.float32(2.0**-31), right + np.float32(1e-6)
    assert difference(PARTIAL, [near], near, Bounds(right, perturbed, 4.0), tf.float32) is None
    assert difference(PARTIAL, [far], far, Bounds(right, perturbed, 4.0), tf.float32) is not None
    assert asked == [2, 10] * 2


@pytest.mark.parametrize("dtype", [np.int32, bool, object])
def test_what_is_not_floating_has_to_be_equal(dtype: type) -> None:
    right = np.array([1, 0, 1], dtype)
    other, tf_dtype = np.array([1, 1, 1], dtype), tf.string if dtype is object else tf.as_dtype(dtype)
    assert difference(REPLICATE, [right], right, _exact(right), tf_dtype) is None
    assert difference(REPLICATE, [other], other, _exact(right), tf_dtype) is not None
    assert difference(REPLICATE, [other], other, Bounds(right, lambda _: [other], 1.0), tf_dtype) is None, "the last bits decide it"


@pytest.mark.parametrize(
    ("placement", "shapes", "traced", "fits"),
    [
        (Shard(0), [[2, 3], [1, 3]], [3, 3], True),
        (Shard(0), [[2, 3], [1, 4]], None, False),
        (Shard(3), [[2], [2]], None, False),
        (Shard(1), [[2, 3], [2, 3]], [4, 3], False),
        (Shard(1), [[2, 3], [2, 0]], [2, None], True),
        (PARTIAL, [[2], [1]], None, False),
        (REPLICATE, [[2], [2]], [2], True),
    ],
)
def test_shapes_that_make_a_tensor(placement: Any, shapes: list[list[int]], traced: Any, fits: bool) -> None:
    assert fits == (not shape_problem(placement, list(map(tf.TensorShape, shapes)), tf.TensorShape(traced)))


def test_a_replica_with_another_shape_is_named() -> None:
    right = np.zeros([2], np.float32)
    found = difference(REPLICATE, [right, right[:1]], right, _exact(right), tf.float32)
    assert found is not None
    assert found.replica == 1


def test_what_nobody_can_repeat_is_alike_on_all_replicas() -> None:
    drawn = _numbers(tf.float32, 4)
    assert disagreement([drawn, drawn.copy()], tf.float32) is None
    found = disagreement([drawn, drawn, as_array(nudged(tf.constant(drawn)))], tf.float32)
    assert found is not None
    assert found.replica == 2
