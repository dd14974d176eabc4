"""Compares the replicas' values of a tensor with those of one device. The tolerance is computed.

An operation is repeated on inputs that are changed in their last bit. The spread of its results shows the effect of rounding.
A sum of n numbers in another order may have about sqrt(n) times that error.
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
"""Kernels round several times: an exponential of one row and one of many may differ by some last bits."""
_PERTURBED = (2, 10)
"""The numbers of perturbations. A sum of numbers that cancel takes few values, and may be equal by chance."""
_IN_16_BITS = 4.0
"""The largest number of roundings of a sum: kernels sum 16-bit numbers in 32 bits."""


class Difference(NamedTuple):
    """A difference between replicas and one device.

    Attributes:
        replica: The replica that differs; None if it is the value of all together.
        found: The largest difference; for values that are not numbers, how many elements differ.
        tolerance: The largest difference that rounding can explain.
        problem: A description, if no number describes the difference.
    """

    replica: int | None
    found: float = math.nan
    tolerance: float = 0.0
    problem: str = ""


class Bounds(NamedTuple):
    """The result of one device, and the effect of rounding on it.

    Attributes:
        right: The result.
        perturbed: Returns the results for this number of perturbations of the inputs. It is called only if a difference is
            suspected.
        terms: Number of summed terms.
    """

    right: np.ndarray
    perturbed: Callable[[int], Sequence[np.ndarray]]
    terms: float


def as_array(value: Any) -> np.ndarray:
    """Converts a TensorFlow value to an array, including scalar strings."""
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return np.array(value, object) if isinstance(value, bytes) else np.asarray(value)


def nudged(value: tf.Tensor) -> tf.Tensor:
    """Changes numbers randomly in their last bit. Zeros, and values that are not floating, stay as they are."""
    if value.dtype not in _LAST_BIT:
        return value
    wide = {tf.float64: tf.float64, tf.complex64: tf.complex64, tf.complex128: tf.complex128}.get(value.dtype, tf.float32)
    factors = 1.0 + _LAST_BIT[value.dtype] * tf.random.uniform(tf.shape(value), -1.0, 1.0, tf.float64)
    return tf.cast(tf.cast(value, wide) * tf.cast(factors, wide), value.dtype)


def shape_problem(placement: Placement, shapes: Sequence[tf.TensorShape], shape: tf.TensorShape) -> str:
    """Describes why the replicas' tensors do not form a global tensor of a shape; empty if they do.

    Args:
        placement: Its placement.
        shapes: The shape on each replica.
        shape: The shape in the trace, as far as known.
    """
    first = shapes[0].as_list()
    found = ", ".join(str(each.as_list()) for each in shapes)
    if isinstance(placement, Shard):
        axis = placement.axis
        others = {tuple(each.as_list()[:axis] + each.as_list()[axis + 1 :]) for each in shapes}
        if len(others) > 1 or axis >= len(first):
            return f"what replicas have makes no tensor: {found}"
        first[axis] = sum(each[axis] for each in shapes)
    elif isinstance(placement, Partial) and len({tuple(each.as_list()) for each in shapes}) > 1:
        return f"what replicas have makes no tensor: {found}"
    if shape.is_compatible_with(first):
        return ""
    return f"what replicas have is of shape {found}, where one device has {shape.as_list()}"


def joined(placement: Placement, of_replicas: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the global tensor, given the replicas' tensors.

    Args:
        placement: Its placement.
        of_replicas: The tensor on each replica.
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
    """Compares a tensor with that of one device.

    Args:
        placement: Its placement.
        of_replicas: The value on each replica.
        whole: The global value.
        bounds: The result of one device.
        dtype: The dtype of the tensor.
        summed: The addends of the replicas, if it is a sum.

    Returns:
        The difference; None if rounding can explain it.
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
    """Compares values that should be equal on all replicas, if the result of one device is unknown.

    Args:
        of_replicas: The value on each replica.
        dtype: The dtype of the tensor.
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
        return 2.0 * spread  # Equally many elements may change again.
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
    """Returns the largest difference, infinity if only one value is finite. For other dtypes, how many elements differ."""
    if dtype not in _LAST_BIT:
        return float(np.sum(np.asarray(own != right)))
    if dtype in (tf.float32, tf.float64):  # A fast path, since most tensors are finite and large ones take time.
        with np.errstate(all="ignore"):
            plain = float(np.max(np.abs(own - right), initial=0.0))
        if math.isfinite(plain):
            return plain
    own, right = _wide(own, dtype), _wide(right, dtype)
    with np.errstate(all="ignore"):
        same = (own == right) | (np.isnan(own) & np.isnan(right))
        parted = np.where(same, 0.0, np.abs(own - right))
    return float(np.max(np.nan_to_num(parted, nan=np.inf), initial=0.0))
