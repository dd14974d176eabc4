"""Operations that make several tensors of one, or one of several."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Rows, Shard, Size
from tfrep_strategy.partitioner.planner import Planner, rule


@rule("Split", "SplitV")
def split(plan: Planner, operation: Any) -> None:
    """Another axis than that of the rows is split."""
    place = 1 if operation.type == "Split" else 0
    x, axis = operation.inputs[place], plan.number(operation.inputs[0 if place else 2])
    placement, known = plan.placement(x), plan.rank(x)
    is_other = axis is not None and known and isinstance(placement, Shard) and axis % known != placement.axis
    if not isinstance(placement, Partial) and not is_other:
        plan.replicate(operation)
        return
    inputs = [plan.local(t) if i == place else plan.replicated(t) for i, t in enumerate(operation.inputs)]
    plan.emit(operation, inputs, placement)


@rule("Unpack")
def unpack(plan: Planner, operation: Any) -> None:
    """An axis becomes tensors."""
    (x,) = operation.inputs
    placement, known = plan.placement(x), plan.rank(x)
    axis = operation.get_attr("axis") % known if known else None
    if isinstance(placement, Partial):
        plan.emit(operation, [plan.local(x)], PARTIAL)
    elif isinstance(placement, Shard) and axis is not None and axis != placement.axis:
        plan.emit(operation, [plan.local(x)], placement.on(placement.axis - (axis < placement.axis)))
    else:
        plan.replicate(operation)


@rule("Pack", "ConcatV2")
def join(plan: Planner, operation: Any) -> None:
    """Tensors become one, along another axis than that of the rows."""
    is_pack = operation.type == "Pack"
    tensors = list(operation.inputs) if is_pack else list(operation.inputs)[:-1]
    rest = [] if is_pack else [plan.replicated(operation.inputs[-1])]
    if operation.outputs[0].dtype == tf.variant:
        plan.replicate(operation)
        return
    placements, known = [plan.placement(x) for x in tensors], operation.outputs[0].shape.rank
    axis = operation.get_attr("axis") if is_pack else plan.number(operation.inputs[-1])
    shards = {p for p in placements if isinstance(p, Shard)}
    if not shards:
        plan.emit(operation, [*map(plan.partial, tensors), *rest], PARTIAL)
        return
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None or known is None or axis is None:
        plan.replicate(operation)
        return
    if not is_pack and axis % known == shard.axis:
        _join_rows(plan, operation, tensors, shard.axis)
        return
    size_ = next(x.shape[shard.axis] for x, p in zip(tensors, placements, strict=True) if p == shard)
    if any(
        p != shard and (isinstance(p, Partial) or not plan.have_rows(x, shard, size_))
        for x, p in zip(tensors, placements, strict=True)
    ):
        plan.replicate(operation)
        return
    placement = shard.on(shard.axis + (is_pack and axis % known <= shard.axis))
    plan.emit(operation, [*(plan.sharded(x, shard) for x in tensors), *rest], placement)


def _join_rows(plan: Planner, operation: Any, tensors: list[Any], axis: int) -> None:
    """Joins rows and rows, as of two views of a batch: a replica goes on with its part of the result."""
    (result,) = operation.outputs
    size: Size = 0
    for x in tensors:
        dims = plan.dims(x)
        size = None if size is None or dims is None or dims[axis] is None else size + dims[axis]
    if not isinstance(size, Rows):
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.replicated(x) for x in operation.inputs], REPLICATE)
    whole, shard = plan.local(result), size.at(axis)
    plan.put(result, shard, plan.cut(whole, shard, result.shape.rank))
    plan.whole[result.name] = whole
