"""Compares what replicas have of a tensor with what one device computes, to a tolerance that is computed.

An operation is repeated on inputs that are changed in their last bit. How far its results part tells how rounding shows in them.
A sum of n numbers in another order may be rounded about sqrt(n) times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.partitioner.placements import Partial, Placement, Shard

_LAST_BIT = {
    tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.complex64: 2.0**-23, tf.float64: 2.0**-52,
    tf.complex128: 2.0**-52,
}  # fmt: skip
_SAFETY = 8.0
"""Kernels round each operation several times: an exponential of one row and one of many may differ by some last bits."""
_PERTURBED = (2, 10)
"""How often inputs are changed. A sum of numbers that cancel takes few values, and may come out the same by chance."""
_IN_16_BITS = 4.0
"""How often a sum is rounded at most: kernels add up numbers of 16 bits in 32."""


class Difference(NamedTuple):
    """How replicas part from one device.

    Attributes:
        replica: Which of them does; None if it is what all of them make together.
        found: The largest difference. For what is no number: how many elements differ.
        tolerance: The largest that rounding can explain.
        problem: What is wrong, if no number tells it.
    """

    replica: int | None
    found: float = math.nan
    tolerance: float = 0.0
    problem: str = ""


class Bounds(NamedTuple):
    """What one device gives, and how far rounding may part from it.

    Attributes:
        right: What it gives.
        perturbed: Returns what it gives when its inputs are changed in their last bit, so many times. It is called if something
            seems to differ.
        terms: How many numbers are added up.
    """

    right: np.ndarray
    perturbed: Callable[[int], Sequence[np.ndarray]]
    terms: float


def as_array(value: Any) -> np.ndarray:
    """Returns what TensorFlow gives NumPy as an array: a scalar string is none."""
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return np.array(value, object) if isinstance(value, bytes) else np.asarray(value)


def nudged(value: tf.Tensor) -> tf.Tensor:
    """Returns numbers that are changed in their last bit, at random. Zeros, and what is no floating number, stay as they are."""
    if value.dtype not in _LAST_BIT:
        return value
    wide = {tf.float64: tf.float64, tf.complex64: tf.complex64, tf.complex128: tf.complex128}.get(value.dtype, tf.float32)
    factors = 1.0 + _LAST_BIT[value.dtype] * tf.random.uniform(tf.shape(value), -1.0, 1.0, tf.float64)
    return tf.cast(tf.cast(value, wide) * tf.cast(factors, wide), value.dtype)


def shape_problem(placement: Placement, shapes: Sequence[tf.TensorShape], shape: tf.TensorShape) -> str:
    """Says why what replicas have makes no global tensor of a shape; returns nothing if it does.

    Args:
        placement: How it is placed.
        shapes: Of what each replica has.
        shape: What the trace knows of its shape.
    """
    first = shapes[0].as_list()
    told = ", ".join(str(each.as_list()) for each in shapes)
    if isinstance(placement, Shard):
        axis = placement.axis
        others = {tuple(each.as_list()[:axis] + each.as_list()[axis + 1 :]) for each in shapes}
        if len(others) > 1 or axis >= len(first):
            return f"what replicas have makes no tensor: {told}"
        first[axis] = sum(each[axis] for each in shapes)
    elif isinstance(placement, Partial) and len({tuple(each.as_list()) for each in shapes}) > 1:
        return f"what replicas have makes no tensor: {told}"
    if shape.is_compatible_with(first):
        return ""
    return f"what replicas have is of shape {told}, where one device has {shape.as_list()}"


def joined(placement: Placement, of_replicas: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the global tensor of what replicas have of it.

    Args:
        placement: How it is placed.
        of_replicas: What each replica has.
    """
    if isinstance(placement, Shard):
        return tf.concat(of_replicas, placement.axis)
    return tf.add_n(of_replicas) if isinstance(placement, Partial) else of_replicas[0]


def difference(
    placement: Placement,
    of_replicas: Sequence[np.ndarray],
    whole: np.ndarray,
    bounds: Bounds,
    dtype: tf.DType,
    summed: Sequence[np.ndarray] = (),
) -> Difference | None:
    """Compares a tensor.

    Args:
        placement: How it is placed.
        of_replicas: What each replica has.
        whole: What they make together.
        bounds: What one device has.
        dtype: Of the tensor.
        summed: Of which addends replicas have made it, if it is a sum.

    Returns:
        None if rounding can explain what differs.
    """
    right, addends = bounds.right, of_replicas if isinstance(placement, Partial) else summed
    if np.shape(whole) != np.shape(right):
        return Difference(None, problem=f"the shape is {list(np.shape(whole))}, and {list(np.shape(right))} on one device")
    limit = _tolerance(right, (), bounds.terms, addends, dtype)
    if isinstance(placement, Shard):
        ends = np.cumsum([x.shape[placement.axis] for x in of_replicas])[:-1]
        pairs = list(enumerate(zip(of_replicas, np.split(right, ends, placement.axis), strict=True)))
    elif isinstance(placement, Partial):
        pairs = [(-1, (whole, right))]
    else:
        pairs = [(i, (each, right)) for i, each in enumerate(of_replicas)]
    for replica, (own, wanted) in pairs:
        if np.shape(own) != np.shape(wanted):
            return Difference(replica, problem=f"the shape is {list(np.shape(own))}, and {list(np.shape(wanted))} on one device")
        found = _distance(own, wanted, dtype)
        for times in _PERTURBED:
            if not found <= limit:
                limit = _tolerance(right, bounds.perturbed(times), bounds.terms, addends, dtype)
        if not found <= limit:
            return Difference(None if replica < 0 else replica, found, limit)
    return None


def disagreement(of_replicas: Sequence[np.ndarray], dtype: tf.DType) -> Difference | None:
    """Compares what all replicas should have alike, where nobody knows what one device has.

    Args:
        of_replicas: What each replica has.
        dtype: Of the tensor.
    """
    first = of_replicas[0]
    for replica, each in enumerate(of_replicas[1:], 1):
        if np.shape(each) != np.shape(first) or _distance(each, first, dtype) > 0:
            return Difference(replica, problem="replicas should have it alike, and this one differs from replica 0")
    return None


def _tolerance(
    right: np.ndarray, perturbed: Sequence[np.ndarray], terms: float, addends: Sequence[np.ndarray], dtype: tf.DType
) -> float:
    spread = max((_distance(each, right, dtype) for each in perturbed if np.shape(each) == np.shape(right)), default=0.0)
    if dtype not in _LAST_BIT:
        return 2.0 * spread  # As many elements may be decided otherwise again.
    scale = max(_largest(right, dtype), sum(_largest(each, dtype) for each in addends))
    spread = spread if math.isfinite(spread) else 0.0
    rounded = math.sqrt(max(1.0, terms))
    if dtype.size == 2:
        rounded = min(rounded, _IN_16_BITS)
    return _SAFETY * rounded * (spread + _LAST_BIT[dtype] * scale)


def _largest(value: np.ndarray, dtype: tf.DType) -> float:
    plain = float(np.max(np.abs(value), initial=0.0)) if dtype in (tf.float32, tf.float64) else math.nan
    if math.isfinite(plain):
        return plain
    wide = _wide(value, dtype)
    return float(np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide)))


def _wide(value: np.ndarray, dtype: tf.DType) -> Any:
    return np.asarray(value).astype(np.complex128 if dtype.is_complex else np.float64)


def _distance(own: np.ndarray, right: np.ndarray, dtype: tf.DType) -> float:
    """Returns the largest difference; infinity where one is finite and the other is not. Of what is no number: how many differ."""
    if dtype not in _LAST_BIT:
        return float(np.sum(np.asarray(own != right)))
    if dtype in (tf.float32, tf.float64):  # Most are finite. Large tensors take time.
        with np.errstate(all="ignore"):
            plain = float(np.max(np.abs(own - right), initial=0.0))
        if math.isfinite(plain):
            return plain
    own, right = _wide(own, dtype), _wide(right, dtype)
    with np.errstate(all="ignore"):
        same = (own == right) | (np.isnan(own) & np.isnan(right))
        parted = np.where(same, 0.0, np.abs(own - right))
    return float(np.max(np.nan_to_num(parted, nan=np.inf), initial=0.0))
