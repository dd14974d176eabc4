"""Scatters, and sums of segments, which are the gradients of gathers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.rules.chosen_rows import chosen_among, own_places


@rule("UnsortedSegmentSum")
def segment_sum(plan: Planner, operation: Any) -> None:
    """Rows are added up by their numbers, which is how gradients of tables come."""
    data, segments, number = operation.inputs
    placement, own = plan.placement(data), plan.placement(segments)
    among, size = chosen_among(plan, segments), plan.sizes_of(number)
    if among is not None and placement == own and size is not None and size == among.size:  # Of a gradient of chosen rows.
        count = plan.as_dtype(plan.elements(among).count, number.dtype)
        plan.emit(operation, [plan.local(data), own_places(plan, segments, among), count], among)
        return
    rest = plan.replicated(number)
    are_rows = isinstance(own, Shard) and (placement == own or (isinstance(placement, Replicate) and plan.have_rows(data, own)))
    if isinstance(own, Shard) and are_rows:
        plan.emit(operation, [plan.sharded(data, own), plan.local(segments), rest], PARTIAL)
    elif isinstance(placement, Partial) and isinstance(own, Replicate):
        plan.emit(operation, [plan.local(data), plan.local(segments), rest], PARTIAL)
    else:
        plan.replicate(operation)


_EXTREMES = {"UnsortedSegmentMax": "Max", "UnsortedSegmentMin": "Min", "UnsortedSegmentProd": "Prod"}


@rule(*_EXTREMES)
def segment_extremes(plan: Planner, operation: Any) -> None:
    """Of each segment, a maximum over rows is the maximum of the replicas' maxima."""
    data, segments, number = operation.inputs
    own, add = plan.placement(segments), plan.program.add
    if not isinstance(own, Shard) or own.axis or plan.placement(data) != own:
        plan.replicate(operation)
        return
    inputs = [plan.local(data), plan.local(segments), plan.replicated(number)]
    of_own = add("ExpandDims", plan.program.copy_of(operation, inputs).outputs[0], 0)
    of_own.shape = tf.TensorShape([1]).concatenate(operation.outputs[0].shape)
    of_all = plan.program.send("gather", of_own)
    plan.put(operation.outputs[0], REPLICATE, add(_EXTREMES[operation.type], of_all, 0, keep_dims=False))


@rule("ScatterNd")
@always
def scatter(plan: Planner, operation: Any) -> None:
    """Updates of own rows are put among zeros, and add up."""
    indices, updates, shape = operation.inputs
    placement = plan.placement(updates)
    is_own = isinstance(placement, Shard) and placement.axis == 0 and placement == plan.placement(indices)
    among, sizes = chosen_among(plan, indices), plan.sizes_of(shape)
    if among is not None and is_own and sizes is not None and sizes[0] == among.size:  # The gradient of chosen rows.
        plan.emit(operation, [own_places(plan, indices, among), plan.local(updates), plan.own_sizes(shape, among)], among)
        plan.known_dims[operation.outputs[0].name] = list(sizes)
        return
    is_sum = isinstance(placement, Partial) and isinstance(plan.placement(indices), Replicate)
    if is_own or is_sum:
        plan.emit(operation, [plan.local(indices), plan.local(updates), plan.replicated(shape)], PARTIAL)
    else:
        plan.replicate(operation)
    if sizes is not None:
        plan.known_dims[operation.outputs[0].name] = list(sizes)


@rule("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub", "TensorScatterUpdate")
def scatter_into(plan: Planner, operation: Any) -> None:
    """Parts of a tensor are changed, each of which has rows; or own rows are added to parts of one that has none."""
    x, indices, updates = operation.inputs
    depth, rank, of_updates = indices.shape[-1] if indices.shape.rank else None, plan.rank(x), plan.placement(updates)
    shards = set()
    if depth is not None and rank is not None and isinstance(plan.placement(indices), Replicate):
        further = indices.shape.rank - 1 - depth  # By which an axis is further behind in the updates.
        if isinstance(own := plan.placement(x), Shard) and own.axis >= depth:
            shards.add(own)
        if isinstance(of_updates, Shard) and of_updates.axis >= indices.shape.rank - 1:
            shards.add(of_updates.on(of_updates.axis - further))
    if len(shards) == 1:
        shard = shards.pop()
        moved = shard.on(shard.axis + further)
        size = x.shape[shard.axis] if plan.placement(x) == shard else updates.shape[moved.axis]
        if plan.have_rows(x, shard, size) and plan.have_rows(updates, moved, size):
            own_updates = plan.filled(plan.sharded(updates, moved), moved, updates)
            plan.emit_filled(operation, [plan.sharded(x, shard), plan.local(indices), own_updates], [0], shard, shard)
            return
    is_own = isinstance(of_updates, Shard) and of_updates.axis == 0 and plan.placement(indices) == of_updates
    if is_own and operation.type in ("TensorScatterAdd", "TensorScatterSub"):
        plan.emit(operation, [plan.partial(x), plan.local(indices), plan.local(updates)], PARTIAL)
    else:
        plan.replicate(operation)
