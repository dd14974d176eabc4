"""Variables and functions."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.partitioner.placements import REPLICATE, Own, Partial
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
    """A variable that holds addends gets addends; every other one the whole, with the same bits on all ranks."""
    handle, new = operation.inputs
    value = plan.value(handle)
    if isinstance(value.placement, Partial):
        local = plan.partial(new)
    elif isinstance(plan.placement(new), Own) and not (value.is_shared and plan.local_replicas > 1):
        local = plan.local(new)
    else:
        local = plan.agreed(new)
    plan.add_write(operation, [value.local, local])


@rule("MakeIterator")
@always
def begin_to_read(plan: Planner, operation: Any) -> None:
    """An iterator is handed on when it has begun: what reads it may run in another function than this operation."""
    plan.replicate(operation)
    _, iterator = operation.inputs
    value, node = plan.value(iterator), plan.node_of(operation)
    begun = plan.program.add("Identity", value.local)
    plan.program.run_after(begun.node, [node])
    begun.node.once = node.once
    local = plan.program.send("shared", begun) if node.once else begun
    plan.put(iterator, value.placement, local, is_shared=value.is_shared)


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
    plan.called[operation.name] = graph, inner
    for given, own in zip(operation.inputs, graph.inputs, strict=True):
        plan.hand_over(inner, own, plan, given)
    # Behind them are outputs for a gradient that some other call has.
    for result, own in zip(operation.outputs, graph.outputs, strict=False):
        plan.hand_over(inner, own, plan, result)
