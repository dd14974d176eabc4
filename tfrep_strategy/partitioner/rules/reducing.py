"""Operations that reduce axes, or run along one."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Shard
from tfrep_strategy.partitioner.planner import Planner, Rule, always, rule
from tfrep_strategy.partitioner.program import Tensor
from tfrep_strategy.partitioner.rules.deviations import sum_of_squared_deviations
from tfrep_strategy.partitioner.rules.softmaxes import ACROSS_REPLICAS
from tfrep_strategy.partitioner.same_bits import AT_ONCE

_OTHERS = {"Max": "Max", "Min": "Min", "Prod": "Prod", "All": "All", "Any": "Any", "EuclideanNorm": None}


def reduced_axes(plan: Planner, operation: Any) -> list[int] | None:
    """Returns which axes an operation reduces, from 0; None if that is not known."""
    axes, rank = plan.numbers(operation.inputs[1]), plan.rank(operation.inputs[0])
    return None if axes is None or rank is None else [axis % rank for axis in axes]


def _kept(shard: Shard, axes: list[int], keeps: bool) -> Shard:
    return shard if keeps else shard.on(shard.axis - sum(axis < shard.axis for axis in axes))


def _note_dims(plan: Planner, operation: Any) -> None:
    """Notes sizes of a result that tracing did not know."""
    axes, dims = reduced_axes(plan, operation), plan.dims(operation.inputs[0])
    if axes is None or dims is None:
        return
    if operation.get_attr("keep_dims"):
        left = [1 if axis in axes else d for axis, d in enumerate(dims)]
    else:
        left = [d for axis, d in enumerate(dims) if axis not in axes]
    plan.known_dims[operation.outputs[0].name] = left


def noting_dims(function: Rule) -> Rule:
    """Has a rule of a reduction note the sizes of its result, also where nothing is sharded."""

    @always
    @functools.wraps(function)
    def noting(plan: Planner, operation: Any) -> None:
        function(plan, operation)
        _note_dims(plan, operation)

    return noting


@rule("Sum")
@noting_dims
def sum_(plan: Planner, operation: Any) -> None:
    """A sum over rows is the sum of the replicas' sums."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if axes == []:
        plan.put_same(operation, x)
    elif isinstance(placement, Partial) and axes is not None:
        plan.emit(operation, [plan.local(x), plan.replicated(operation.inputs[1])], PARTIAL)
    elif not isinstance(placement, Shard) or axes is None:
        _replicate(plan, operation)
    elif placement.axis in axes and (found := sum_of_squared_deviations(plan, x, axes)) is not None:
        _put_reduced(plan, operation, found)
    else:
        inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
        plan.emit(operation, inputs, PARTIAL if placement.axis in axes else _kept(placement, axes, keeps))


def _replicate(plan: Planner, operation: Any) -> None:
    """Every replica adds up all of a tensor: a large one in steps, so that it does not matter how many threads do it."""
    x, (result,) = operation.inputs[0], operation.outputs
    size = x.shape.num_elements() or 0
    if size <= AT_ONCE or result.shape.num_elements() != 1 or not (x.dtype.is_floating or x.dtype.is_complex):
        plan.replicate(operation)
        return
    total, add = plan.replicated(x), plan.program.add
    if operation.type == "L2Loss":
        total = add("Square", total)
    left = size
    while left > AT_ONCE and (each := max(k for k in range(1, 1025) if left % k == 0)) > 1:
        total, left = add("Sum", add("Reshape", total, [-1, each]), 1), left // each
    total = add("Sum", total, list(range(1 if left < size else x.shape.rank)))
    total.varies = total.varies or left > AT_ONCE
    if operation.type != "Sum":
        by = plan.program.constant(2 if operation.type == "L2Loss" else size, x.dtype)
        total = add("RealDiv", total, by)
    if result.shape.rank:
        total = add("Reshape", total, result.shape.as_list())
    plan.put(result, REPLICATE, total)


def _put_reduced(plan: Planner, operation: Any, total: Tensor) -> None:
    """Gives the result of a reduction its value, of which the reduced axes are still there."""
    if not operation.get_attr("keep_dims"):
        total = plan.program.add("Squeeze", total, squeeze_dims=reduced_axes(plan, operation))
    plan.put(operation.outputs[0], REPLICATE, total)


@rule("Mean")
@noting_dims
def mean(plan: Planner, operation: Any) -> None:
    """A mean over rows is the sum of the replicas' sums, each divided by the number of all elements."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if not isinstance(placement, (Shard, Partial)) or axes is None:
        _replicate(plan, operation)
        return
    inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
    if isinstance(placement, Partial) or placement.axis not in axes:
        plan.emit(operation, inputs, PARTIAL if isinstance(placement, Partial) else _kept(placement, axes, keeps))
        return
    if not x.dtype.is_floating and not x.dtype.is_complex:
        plan.replicate(operation)
        return
    add = plan.program.add
    dtype = tf.float32 if x.dtype.size == 2 else x.dtype  # A sum of halves could overflow where their mean does not.
    rows = inputs[0] if dtype == x.dtype else add("Cast", inputs[0], DstT=dtype)
    total = add("Sum", rows, inputs[1], keep_dims=keeps)
    count = add("Cast", plan.elements(placement).total, DstT=dtype)
    others = [axis for axis in axes if axis != placement.axis]
    if others:
        sizes = add("GatherV2", add("Shape", inputs[0]), others, 0)
        count = add("Mul", count, add("Cast", add("Prod", sizes, 0), DstT=dtype))
    if (found := sum_of_squared_deviations(plan, x, axes)) is not None:
        _put_reduced(plan, operation, add("RealDiv", found, count))
        return
    addend = add("RealDiv", total, count)
    plan.put(operation.outputs[0], PARTIAL, addend if dtype == x.dtype else add("Cast", addend, DstT=x.dtype))


@rule(*_OTHERS)
@noting_dims
def reduced_twice(plan: Planner, operation: Any) -> None:
    """A maximum over rows is the maximum of the replicas' maxima."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if not isinstance(placement, Shard) or axes is None:
        plan.replicate(operation)
        return
    inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
    if placement.axis not in axes:
        plan.emit(operation, inputs, _kept(placement, axes, keeps))
        return
    if _OTHERS[operation.type] is None:
        plan.replicate(operation)
        return
    add = plan.program.add
    own = add(operation.type, *inputs, keep_dims=True)
    own.shape = tf.TensorShape([None] * (plan.rank(x) or 1))
    of_all = plan.program.send("gather", own, placement.axis)
    plan.put(operation.outputs[0], REPLICATE, add(operation.type, of_all, inputs[1], keep_dims=keeps))


@rule("L2Loss")
@always
def l2_loss(plan: Planner, operation: Any) -> None:
    """Half the sum of squares."""
    if isinstance(plan.placement(operation.inputs[0]), Shard):
        plan.emit(operation, plan.locals(operation), PARTIAL)
    else:
        _replicate(plan, operation)


@rule("ArgMax", "ArgMin")
def arg_max(plan: Planner, operation: Any) -> None:
    """Along another axis than the rows."""
    x = operation.inputs[0]
    placement, axis, rank = plan.placement(x), plan.number(operation.inputs[1]), plan.rank(x)
    if not isinstance(placement, Shard) or axis is None or rank is None or axis % rank == placement.axis:
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.local(x), plan.replicated(operation.inputs[1])], _kept(placement, [axis % rank], False))


_TOTALS = {"Cumsum": ("Sum", "AddV2"), "Cumprod": ("Prod", "Mul")}
"""By what an operation makes cumulative: what it makes of all rows, and of two such."""


def _cumulate_rows(plan: Planner, operation: Any, shard: Shard, rank: int) -> None:
    """Each replica goes on from the total of the rows of those before it."""
    (x, axis), (result,) = operation.inputs, operation.outputs
    (total, joined), add, replica = _TOTALS[operation.type], plan.program.add, plan.rows.replica
    inputs = [plan.local(x), plan.replicated(axis)]
    of_own = add(total, *inputs, keep_dims=True)
    of_own.shape = tf.TensorShape([None] * rank)
    of_all = plan.program.send("gather", of_own, shard.axis)
    if operation.get_attr("reverse"):
        first, count = add("AddV2", replica, 1), plan.program.constant(-1)
    else:
        first, count = plan.program.constant(0), replica
    bounds = plan.vector(rank, shard.axis, 0, first), plan.vector(rank, shard.axis, -1, count)
    of_others = add(total, add("Slice", of_all, *bounds), inputs[1], keep_dims=True)
    plan.put(result, shard, add(joined, plan.program.copy_of(operation, inputs).outputs[0], of_others))


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative(plan: Planner, operation: Any) -> None:
    """Along any axis; a cumulative sum of a sum is a sum."""
    x = operation.inputs[0]
    placement, axis, rank = plan.placement(x), plan.number(operation.inputs[1]), plan.rank(x)
    inputs = operation.inputs
    if isinstance(placement, Partial) and operation.type == "Cumsum":
        plan.emit(operation, [plan.local(x), plan.replicated(inputs[1])], PARTIAL)
    elif isinstance(placement, Shard) and axis is not None and rank is not None and axis % rank != placement.axis:
        plan.emit(operation, [plan.local(x), plan.replicated(inputs[1])], placement)
    elif isinstance(placement, Shard) and axis is not None and rank is not None and operation.type in _TOTALS:
        _cumulate_rows(plan, operation, placement, rank)
    else:
        plan.replicate(operation)


@rule(
    "Softmax",
    "LogSoftmax",
    "TopKV2",
    "InTopKV2",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SoftmaxCrossEntropyWithLogits",
)
def along_last_axis(plan: Planner, operation: Any) -> None:
    """Each row by itself, along the last axis."""
    x = operation.inputs[0]
    rank = plan.rank(x)
    shards = {p for p in map(plan.placement, operation.inputs) if isinstance(p, Shard)}
    placement = plan.placement(x)
    known = operation.type in ACROSS_REPLICAS and x.dtype.size > 2  # Sums of halves would be rounded otherwise.
    if known and isinstance(placement, Shard) and rank is not None and placement.axis == rank - 1:
        ACROSS_REPLICAS[operation.type](plan, operation, placement)
        return
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None or rank is None or shard.axis == rank - 1:
        plan.replicate(operation)
        return
    size = next(t.shape[shard.axis] for t in operation.inputs if plan.placement(t) == shard)
    inputs = []
    for tensor in operation.inputs:
        if not tensor.shape.rank:  # How many are wanted.
            inputs.append(plan.replicated(tensor))
        elif plan.placement(tensor) == shard or plan.have_rows(tensor, shard, size):
            inputs.append(plan.sharded(tensor, shard))
        else:
            plan.replicate(operation)
            return
    plan.emit(operation, inputs, shard)
    dims = plan.dims(x)
    if dims is not None:
        for result in operation.outputs:  # Of the losses of rows, the last axis has gone.
            known = result.shape.as_list() if result.shape.rank is not None else dims
            plan.known_dims[result.name] = [d if d is not None else dims[i] for i, d in enumerate(known)]


@rule("BiasAddGrad")
def bias_add_gradient(plan: Planner, operation: Any) -> None:
    """The sum over all axes but that of the channels."""
    (x,) = operation.inputs
    placement, rank = plan.placement(x), plan.rank(x)
    channels = 1 if operation.get_attr("data_format") == b"NCHW" else -1
    is_summed = isinstance(placement, Shard) and rank is not None and placement.axis != channels % rank
    if isinstance(placement, Partial) or is_summed:
        plan.emit(operation, [plan.local(x)], PARTIAL)
    else:
        plan.replicate(operation)
