"""Rows that data choose, such as those where a mask is true: each replica goes on with those that it has chosen of its own.

How many they are is known when the step runs. Replicas send these numbers where something asks for their sum, as a mean does.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import Rows, Shard
from tfrep_strategy.partitioner.planner import Planner, rule
from tfrep_strategy.partitioner.program import Tensor
from tfrep_strategy.partitioner.values import OwnRows


def _chosen(plan: Planner, own: Tensor) -> Rows:
    """Returns the rows of which a replica has so many as the first axis of a tensor says."""
    add = plan.program.add
    count = add("Slice", add("Shape", own), [0], [1])
    count.shape = tf.TensorShape([1])
    of_all = plan.program.send("gather", count)
    before = add("Slice", of_all, [0], add("Pack", [plan.rows.replica], axis=0))
    start, total = (add("Sum", each, 0, keep_dims=False) for each in (before, of_all))
    return plan.put_rows(OwnRows(start, add("Squeeze", count, squeeze_dims=[0]), total, plan.rows.replica))


@rule("Where")
def where(plan: Planner, operation: Any) -> None:
    """The places where a mask is true: those among own rows, counted from the first row of all."""
    (mask,), (places,) = operation.inputs, operation.outputs
    shard, rank = plan.placement(mask), plan.rank(mask)
    if not isinstance(shard, Shard) or shard.axis or rank is None:
        plan.replicate(operation)
        return
    own = plan.program.copy_of(operation, [plan.local(mask)]).outputs[0]
    rows = _chosen(plan, own)
    plan.put(places, rows.at(0), plan.program.add("AddV2", own, _first(plan, shard, places.dtype, rank)))
    plan.known_dims[places.name] = [rows, rank]


@rule("DynamicPartition")
def partition(plan: Planner, operation: Any) -> None:
    """Each part has the rows that belong to it, in their order."""
    data, parts = operation.inputs
    shard = plan.placement(parts)
    if not isinstance(shard, Shard) or shard.axis or plan.placement(data) != shard or parts.shape.rank != 1:
        plan.replicate(operation)
        return
    node = plan.program.copy_of(operation, plan.locals(operation))
    for part, own in zip(operation.outputs, node.outputs, strict=True):
        plan.put(part, _chosen(plan, own).at(0), own)


def chosen_among(plan: Planner, places: Any) -> Shard | None:
    """Returns the placement of the mask that has chosen the places of rows, with numbers of own rows only; None if none has."""
    while places.op.type in ("Cast", "Identity", "Reshape", "Squeeze"):
        places = places.op.inputs[0]
    placement = plan.values[places.name].placement if places.name in plan.values else None
    if places.op.type != "Where" or not isinstance(placement, Shard):
        return None
    among = plan.placement(places.op.inputs[0])
    return among if isinstance(among, Shard) else None


def own_places(plan: Planner, places: Any, among: Shard) -> Tensor:
    """Returns chosen places, counted from the first of the own rows."""
    depth = places.shape[1] if places.shape.rank == 2 else None
    return plan.program.add("Sub", plan.local(places), _first(plan, among, places.dtype, depth))


def _first(plan: Planner, shard: Shard, dtype: tf.DType, depth: int | None) -> Tensor:
    """Returns the place of the first of the own rows, as a number, or as a vector of so many."""
    start = plan.as_dtype(plan.elements(shard).start, dtype)
    return start if depth is None else plan.vector(depth, 0, 0, start, dtype)
