"""Floats as integers of the same order, for transports whose least and largest floats may lose NaN.

With IEEE 754, floats that are not negative have the order of their bits. Those of negative ones count down, so they are flipped.
NaN becomes the integer that wins: the largest for "max", the least for "min". Both are bits of a NaN again.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_EXTREMES = ("min", "max")


def to_ordered(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Converts a tensor of float32 or float64 for "min" or "max"; returns others as they are. float16 travels as float32.

    Example:
        >>> to_ordered(tf.constant([-1.0, -0.0, 0.0, 1.0, float("nan")]), "max").numpy().tolist()
        [-1065353217, -1, 0, 1065353216, 2147483647]
    """
    if op not in _EXTREMES or not tensor.dtype.is_floating:
        return tensor
    tensor = tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor
    integers = _flipped(tf.bitcast(tensor, tf.int32 if tensor.dtype == tf.float32 else tf.int64))
    wins = integers.dtype.max if op == "max" else integers.dtype.min
    return tf.where(tf.math.is_nan(tensor), tf.constant(wins, integers.dtype), integers)


def from_ordered(tensor: tf.Tensor, dtype: tf.DType, op: str) -> tf.Tensor:
    """Undoes `to_ordered`.

    Args:
        tensor: The integers.
        dtype: The dtype of the original.
        op: The reduction.

    Example:
        >>> from_ordered(to_ordered(tf.constant([-1.5, float("nan")]), "min"), tf.float32, "min").numpy().tolist()
        [-1.5, nan]
    """
    if op not in _EXTREMES or not dtype.is_floating:
        return tensor
    return tf.cast(tf.bitcast(_flipped(tensor), tf.float64 if dtype == tf.float64 else tf.float32), dtype)


def _flipped(integers: tf.Tensor) -> tf.Tensor:
    flipped = tf.bitwise.bitwise_xor(integers, tf.constant(integers.dtype.max, integers.dtype))
    return tf.where(integers < 0, flipped, integers)


def to_ordered_array(array: np.ndarray, op: str) -> np.ndarray:
    """Does what `to_ordered` does with an array of the host.

    Example:
        >>> to_ordered_array(np.array([-0.0, 0.0], "float64"), "min").tolist()
        [-1, 0]
    """
    if op not in _EXTREMES or array.dtype.kind != "f":
        return array
    integers = _flipped_array(array.view(f"i{array.itemsize}"))
    limits = np.iinfo(integers.dtype)
    return np.where(np.isnan(array), limits.max if op == "max" else limits.min, integers)


def from_ordered_array(array: np.ndarray, dtype: np.dtype, op: str) -> np.ndarray:
    """Undoes `to_ordered_array`."""
    return _flipped_array(array).view(dtype) if op in _EXTREMES and dtype.kind == "f" else array


def _flipped_array(integers: np.ndarray) -> np.ndarray:
    return np.where(integers < 0, integers ^ np.iinfo(integers.dtype).max, integers)
