"""Sums of squared deviations from a value that the replicas have yet to find, such as the variance of a batch.

A replica could wait for the value, and send what it finds then. It sends sums of its own rows at once instead, from which all can
tell what the squared deviations from any value add up to: `sum (x - m)^2 = sum x^2 - 2 m sum x + m^2 n`. So the mean and the
variance of a batch cost one round of collectives.

Squares of large values would cancel each other. They are taken from the mean of the replica's own rows, `c`, and put together in
64 bits (T. F. Chan, G. H. Golub, R. J. LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.partitioner.placements import Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Tensor


class _Deviations(NamedTuple):
    """What is squared: `x - center`, or zero where a mask is false."""

    x: Any
    center: Any
    mask: Any


def sum_of_squared_deviations(plan: Planner, squared: Any, axes: Sequence[int]) -> Tensor | None:
    """Returns the sum of a tensor over axes, the rows' among them, whole and with all axes kept.

    Args:
        plan: The planner.
        squared: The tensor, which is placed in rows.
        axes: From 0.

    Returns:
        None if the tensor is not what this module is about, or if nothing would be gained.
    """
    found = _deviations(squared)
    shard = plan.placement(squared)
    if found is None or not isinstance(shard, Shard) or squared.dtype != tf.float32:
        return None
    x, center, mask = found
    dims, of_center = plan.dims(x), plan.dims(center)
    if dims is None or of_center is None or len(of_center) != len(dims) or any(of_center[i] != 1 for i in axes):
        return None  # It may be another value for each row.
    fits = plan.placement(x) == shard and dims == plan.dims(squared) and (mask is None or plan.placement(mask) == shard)
    if not fits or not isinstance(plan.placement(center), Replicate):
        return None
    own, masked = plan.local(x), None if mask is None else plan.local(mask)
    if plan.local(center).level <= max(own.level, 0 if masked is None else masked.level):
        return None
    return _sum(plan, own, masked, plan.local(center), shard, axes)


def _sum(plan: Planner, x: Tensor, mask: Tensor | None, center: Tensor, shard: Shard, axes: Sequence[int]) -> Tensor:
    add, places = plan.program.add, plan.program.constant(list(axes))

    def total(rows: Tensor) -> Tensor:
        return add("Sum", rows, places, keep_dims=True)

    def chosen(rows: Tensor) -> Tensor:
        return rows if mask is None else add("SelectV2", mask, rows, plan.program.constant(0, tf.float32))

    def long(tensor: Tensor) -> Tensor:
        return add("Cast", tensor, DstT=tf.float64)

    def plus(a: Tensor, b: Tensor) -> Tensor:
        return add("AddV2", a, b)

    def times(a: Any, b: Tensor) -> Tensor:
        return add("Mul", a, b)

    def of_replicas(addend: Tensor) -> Tensor:
        addend.shape = center.shape
        sum_ = plan.program.send("sum", addend)
        sum_.shape = center.shape
        return sum_

    if mask is None:
        others = [i for i in axes if i != shard.axis]
        of_row = add("Prod", add("GatherV2", add("Shape", x), others, 0), 0) if others else plan.program.constant(1)
        rows = plan.elements(shard)
        count, of_all = (long(times(each, of_row)) for each in (rows.count, rows.total))
    else:
        count = long(total(add("Cast", mask, DstT=tf.int32)))
        of_all = of_replicas(count)
    at_least_one = add("Maximum", count, plan.program.constant(1, tf.float64))
    mean = add("RealDiv", total(chosen(x)), add("Cast", at_least_one, DstT=tf.float32))
    own = chosen(add("Sub", x, mean))
    c, m, left, squares = long(mean), long(center), long(total(own)), long(total(add("Square", own)))
    c_count = times(c, count)  # The rounded mean leaves something of each sum.
    sums = of_replicas(plus(c_count, left))
    sums_of_squares = of_replicas(plus(squares, times(c, plus(c_count, plus(left, left)))))
    result = plus(sums_of_squares, times(m, add("Sub", times(m, of_all), plus(sums, sums))))
    return add("Cast", add("Maximum", result, plan.program.constant(0, tf.float64)), DstT=tf.float32)


def _deviations(squared: Any) -> _Deviations | None:
    """Returns of what a tensor of the trace holds the squares."""
    operation = squared.op
    if operation.type == "SquaredDifference":
        x, center = operation.inputs
        return _Deviations(x, center, None)
    if operation.type != "Square":
        return None
    mask, difference = None, operation.inputs[0].op
    if difference.type == "SelectV2" and tf.get_static_value(difference.inputs[2]) == 0:
        mask, difference = difference.inputs[0], difference.inputs[1].op
    if difference.type != "Sub":
        return None
    x, center = difference.inputs
    return _Deviations(x, center, mask)
