"""Floats as integers of the same order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.wire import from_ordered, from_ordered_array, to_ordered, to_ordered_array

SORTED = [-np.inf, -1e30, -1.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, 1e30, np.inf]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_order_and_bits_are_kept(op: str, dtype: str) -> None:
    numbers = np.array(SORTED, dtype)
    for integers in (to_ordered_array(numbers, op), to_ordered(tf.constant(numbers), op).numpy()):
        assert (np.diff(integers) > 0).all()
        assert from_ordered_array(integers, numbers.dtype, op).tobytes() == numbers.tobytes()
        assert from_ordered(tf.constant(integers), tf.as_dtype(dtype), op).numpy().tobytes() == numbers.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("op", "reduce"), [("min", np.min), ("max", np.max)])
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_what_is_no_number_wins(nan: float, op: str, reduce: object, dtype: str) -> None:
    numbers = np.array([*SORTED, nan], dtype)
    for integers in (to_ordered_array(numbers, op), to_ordered(tf.constant(numbers), op).numpy()):
        assert np.isnan(from_ordered_array(reduce(integers, keepdims=True), numbers.dtype, op)).all()
        assert np.isnan(from_ordered(tf.constant(reduce(integers)), tf.as_dtype(dtype), op))


@pytest.mark.parametrize("op", ["sum", "mean", "product", "min"])
def test_other_arrays_travel_as_they_are(op: str) -> None:
    array = np.arange(3) if op == "min" else np.ones([3])
    assert to_ordered_array(array, op) is array
    assert from_ordered_array(array, array.dtype, op) is array
