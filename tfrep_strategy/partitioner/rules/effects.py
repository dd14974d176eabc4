"""Variables, functions, and random numbers."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.partitioner.placements import REPLICATE, Own, Partial, Rows, Shard
from tfrep_strategy.partitioner.planner import Planner, always, rule


@rule("ReadVariableOp")
@always
def read(plan: Planner, operation: Any) -> None:
    """A variable is read once between two writes."""
    (handle,) = operation.inputs
    value = plan.value(handle)
    before = plan.last_read(value.local, operation.outputs[0].dtype)
    if before is None:
        plan.emit(operation, [value.local], value.placement)
        local = plan.local(operation.outputs[0])
        plan.access(value.local, local.node, writes=False)
    else:
        plan.put(operation.outputs[0], value.placement, before)


@rule("VariableShape")
@always
def shape_of_variable(plan: Planner, operation: Any) -> None:
    """The copies of a variable have one shape."""
    plan.emit(operation, plan.locals(operation), REPLICATE)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
@always
def write(plan: Planner, operation: Any) -> None:
    """A variable that holds addends gets addends; every other one the whole."""
    handle, new = operation.inputs
    value = plan.value(handle)
    if isinstance(value.placement, Partial):
        local = plan.partial(new)
    elif isinstance(value.placement, Own) and isinstance(plan.placement(new), Own):
        local = plan.local(new)
    else:
        local = plan.replicated(new)
    plan.add_write(operation, [value.local, local])


@rule("PartitionedCall", "StatefulPartitionedCall")
@always
def call(plan: Planner, operation: Any) -> None:
    """A function is planned where it is called. One of TensorFlow's own that has no graph is called with all rows."""
    graph = plan.function(operation, operation.get_attr("f").name)
    if graph is None:
        plan.replicate(operation)
        return
    inner = plan.inside(graph, operation.inputs)
    inner.run(graph)
    for given, own in zip(operation.inputs, graph.inputs, strict=True):
        plan.hand_over(inner, own, plan, given)
    # Behind them are outputs for a gradient that some other call has.
    for result, own in zip(operation.outputs, graph.outputs, strict=False):
        plan.hand_over(inner, own, plan, result)


_DRAWS = {
    "StatelessRandomUniformV2": 0, "StatelessRandomNormalV2": 0, "StatelessTruncatedNormalV2": 0, "StatelessRandomUniformIntV2": 0,
    "StatelessRandomUniformFullIntV2": 0, "StatelessRandomUniform": 0, "StatelessRandomNormal": 0, "StatelessTruncatedNormal": 0,
    "RandomUniform": 0, "RandomStandardNormal": 0, "TruncatedNormal": 0, "RandomUniformInt": 0,
    "StatefulUniform": 2, "StatefulStandardNormalV2": 2,
}  # fmt: skip
"""Where the operations that draw numbers get the shape of what they draw."""


@rule(*_DRAWS)
@always
def draw(plan: Planner, operation: Any) -> None:
    """Every replica draws the numbers of one device, and uses those of its rows."""
    plan.replicate(operation)
    (result,) = operation.outputs
    wanted = operation.inputs[_DRAWS[operation.type]]
    sizes, place = plan.sizes_of(wanted), plan.row_place(wanted)
    if sizes is None:
        return
    known = [None] * sizes.size if result.shape.rank is None else result.shape.as_list()
    plan.known_dims[result.name] = [s if d is None else d for d, s in zip(known, sizes, strict=True)]
    if place is not None and not any(isinstance(x, Rows) for i, x in enumerate(sizes) if i != place[0]):
        whole = plan.replicated(result)
        shard = Shard(*place)
        plan.put(result, shard, plan.cut(whole, shard, sizes.size))
        plan.whole[result.name] = whole
