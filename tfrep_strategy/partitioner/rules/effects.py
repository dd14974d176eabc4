"""Variables, functions, and operations with a mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import operation_definition
from tfrep_strategy.errors import CannotPartitionError, message
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner import sizes as by_value
from tfrep_strategy.partitioner.placements import OF_LAYOUT, OWN, PARTIAL, REPLICATE, Own, Partial, Parts, Replicate, Rows, Shard
from tfrep_strategy.partitioner.planner import MARKED, OF_OWN, Planner, always, rule
from tfrep_strategy.partitioner.program import Collective
from tfrep_strategy.partitioner.second_axis import MODEL, collective_of


@rule("ReadVariableOp")
@always
def read(plan: Planner, operation: Any) -> None:
    """Reads a variable once between two writes."""
    (handle,) = operation.inputs
    value = plan.value(handle)
    local = plan.last_read(value.local, operation.outputs[0].dtype)
    if local is None:
        plan.emit(operation, [value.local], value.placement)
        local = plan.local(operation.outputs[0])
        plan.access(value.local, local.node, writes=False)
    if isinstance(value.placement, Parts):
        local.shape = tf.TensorShape(value.placement.part_shape)
        local = plan.program.add("Reshape", local, plan.program.constant([value.placement.width]))
    plan.put(operation.outputs[0], value.placement, local)


@rule("VariableShape")
@always
def shape_of_variable(plan: Planner, operation: Any) -> None:
    """Returns the shape of a variable, which all its copies share."""
    placement, (result,) = plan.placement(operation.inputs[0]), operation.outputs
    if isinstance(placement, (Parts, Shard)):
        shape = placement.shape if isinstance(placement, Parts) else plan.known_dims[operation.inputs[0].name]
        plan.put(result, REPLICATE, plan.program.constant(shape, result.dtype))
        plan.sizes[result.name] = by_value.array(list(shape))
        return
    plan.emit(operation, plan.locals(operation), REPLICATE)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
@always
def write(plan: Planner, operation: Any) -> None:
    """Writes addends to a partial variable, and the whole value, with the same bits on all ranks, to others."""
    handle, new = operation.inputs
    value = plan.value(handle)
    if isinstance(value.placement, Partial):
        local = plan.partial(new)
    elif isinstance(value.placement, Shard):
        local = plan.sharded(new, value.placement)
    elif isinstance(value.placement, Parts):
        own_shape = plan.program.constant(value.placement.part_shape, tf.int32)
        local = plan.program.add("Reshape", plan.part(new, value.placement), own_shape)
    elif isinstance(plan.placement(new), Own) and not (value.is_shared and plan.local_replicas > 1):
        local = plan.local(new)
    else:
        local = plan.agreed(new)
    plan.add_write(operation, [value.local, local])


@rule("MakeIterator")
@always
def begin_to_read(plan: Planner, operation: Any) -> None:
    """Passes an iterator on after it is initialized. Its readers may be in another function than this operation."""
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
    """Plans a function where it is called. A function without a graph gets all rows."""
    graph = plan.function(operation, operation.get_attr("f").name)
    if graph is None:
        plan.replicate(operation)
        return
    inner = plan.inside(graph, operation.inputs)
    inner.run(graph)
    plan.called[operation.name] = graph, inner
    for given, own in zip(operation.inputs, graph.inputs, strict=True):
        plan.hand_over(inner, own, plan, given)
    # Further outputs are for the gradient of another call.
    for result, own in zip(operation.outputs, graph.outputs, strict=False):
        plan.hand_over(inner, own, plan, result)


MARKS: dict[str, Callable[[Planner, Any], None]] = {}


@rule(MARKED)
@always
def by_its_mark(plan: Planner, operation: Any) -> None:
    """Plans an operation with a mark."""
    mark = marks.mark_of(operation)
    assert mark is not None
    if not plan.is_planned_again or mark in (marks.BATCH, marks.GRADIENT, marks.SLICES):
        MARKS[mark](plan, operation)
    elif mark in (marks.OWN_SUM, marks.SPREAD):
        plan.emit(operation, list(map(plan.replicated, operation.inputs)), REPLICATE)
    else:
        raise CannotPartitionError(
            message(
                "Replicas of a mesh of two axes have no value of their own for an operation.",
                hint="leave out gradient_aggregator and shard_optimizer_state, or make a mesh with one axis above 1.",
                operation=f"{operation.type} {operation.name!r}",
                mark=mark,
            )
        )


def _for(mark: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        MARKS[mark] = function
        return function

    return register


@_for(marks.WITHIN)
def within(plan: Planner, operation: Any) -> None:
    """Sends along the axis of a mesh whose replicas have the same rows. Rows and sums stay what they are."""
    x, (result,) = operation.inputs[0], operation.outputs
    kind, axis = collective_of(operation)
    placement = plan.placement(x)
    if isinstance(placement, Shard):
        stays = kind in ("sum", "gradient", "first") or (kind == "gather" and placement.axis != axis)
    else:
        stays = isinstance(placement, (Replicate, Own)) or (isinstance(placement, Partial) and kind != "first")
    own = plan.local(x) if stays else plan.replicated(x)
    sent = plan.program.send(kind, own, axis, group=MODEL)
    sent.varies = own.varies
    plan.put(result, placement if stays else REPLICATE, sent)
    if (dims := plan.dims(x)) is not None and result.shape.rank == len(dims):
        along = axis if kind == "gather" else None
        known = result.shape.as_list()
        plan.known_dims[result.name] = [known[i] if i == along else size for i, size in enumerate(dims)]


@_for(marks.GRADIENT)
def gradient(plan: Planner, operation: Any) -> None:
    """Sums a partial gradient. A gradient that each replica has computed alone is made equal."""
    (x,) = operation.inputs
    placement, node = plan.placement(x), plan.local(x).node
    if isinstance(placement, Shard) and placement.rows == OF_LAYOUT:
        plan.put(operation.outputs[0], placement, plan.local(x))
    elif isinstance(placement, Partial) and isinstance(node, Collective) and (node.kind, node.group) == ("gradient", MODEL):
        plan.put(operation.outputs[0], REPLICATE, plan.program.send("gradient", node.inputs[0], group=""))  # Along both axes.
    else:
        plan.put(operation.outputs[0], REPLICATE, plan.agreed(x, "gradient"))
    _mark_again(plan, operation)
    if (dims := plan.dims(x)) is not None:
        plan.known_dims[operation.outputs[0].name] = dims


@_for(marks.SLICES)
def slices(plan: Planner, operation: Any) -> None:
    """Gathers the rows of a sparse gradient."""
    (x,) = operation.inputs
    is_sent = plan.placement(x) == Shard(0) and x.name not in plan.whole
    whole = plan.program.send("slices", plan.local(x)) if is_sent else plan.replicated(x)
    plan.put(operation.outputs[0], REPLICATE, whole)
    _mark_again(plan, operation)


def _mark_again(plan: Planner, operation: Any) -> None:
    """Keeps the mark of a result for the plan along the other axis of a mesh."""
    if plan.is_planned_again:
        (result,) = operation.outputs
        value = plan.value(result)
        plan.put(result, value.placement, plan.program.copy_of(operation, [value.local]).outputs[0])


@_for(marks.REPLICA)
def replica(plan: Planner, operation: Any) -> None:
    """Gives each replica its id."""
    plan.put(operation.outputs[0], OWN, plan.rows.replica)


@_for(marks.OWN_ROW)
def own_row(plan: Planner, operation: Any) -> None:
    """Gives each replica its row of a sum."""
    rows, _, axis = operation.inputs
    placement = plan.placement(rows)
    if isinstance(placement, Parts) and rows.shape == (placement.replicas, placement.width):
        own = plan.local(rows)
    elif isinstance(placement, Partial) and rows.name not in plan.whole:
        own = plan.program.send("scatter", plan.local(rows))
    else:
        own = plan.program.add("GatherV2", plan.replicated(rows), plan.rows.replica, plan.replicated(axis))
    plan.put(operation.outputs[0], OWN, own)


@_for(marks.ALL_ROWS)
def all_rows(plan: Planner, operation: Any) -> None:
    """Takes the rows of all replicas as parts of one tensor."""
    row, shape = operation.inputs
    if not isinstance(plan.placement(row), Own):
        plan.emit(operation, [plan.replicated(row), plan.replicated(shape)], REPLICATE)
        return
    (rows,) = operation.outputs
    replicas, width = rows.shape
    plan.put(rows, Parts(width, replicas, replicas * width), plan.local(row))


@_for(marks.ADDEND)
def addend(plan: Planner, operation: Any) -> None:
    """Treats the replicas' own values as addends."""
    (x,) = operation.inputs
    value = plan.value(x)
    plan.put(operation.outputs[0], PARTIAL if isinstance(value.placement, Own) else value.placement, value.local)


@_for(marks.OWN_SUM)
def own_sum(plan: Planner, operation: Any) -> None:
    """Treats the addend of a replica as its own value."""
    (x,) = operation.inputs
    plan.put(operation.outputs[0], OWN, plan.partial(x))


@_for(marks.SPREAD)
def spread(plan: Planner, operation: Any) -> None:
    """Repeats a replica's value for its own rows."""
    own, shape = operation.inputs
    shard = plan.row_place(shape)
    if shard is None:
        hint = "leave out batch_statistics."
        raise CannotPartitionError(message("Statistics of replicas are wanted for rows that are not those of the batch.", hint))
    plan.emit(operation, [plan.local(own), plan.own_sizes(shape, shard)], shard)


@_for(marks.BATCH)
def batch(plan: Planner, operation: Any) -> None:
    """Shards a batch that all replicas have whole, unless rows of another batch are in use."""
    wholes = [plan.replicated(x) for x in operation.inputs]
    if plan.of_model:
        plan.emit(operation, wholes, REPLICATE)
        return
    is_shared = plan.begin_batch(wholes[1], operation.inputs[1].shape[0], wholes[0])
    for place, (tensor, whole) in enumerate(zip(operation.outputs, wholes, strict=True)):
        if place and is_shared:
            shard = Rows().at(0)
            plan.put(tensor, shard, plan.cut(whole, shard, tensor.shape.rank))
            plan.whole[tensor.name] = whole
            plan.known_dims[tensor.name] = [Rows(), *tensor.shape.as_list()[1:]]
        else:
            plan.put(tensor, REPLICATE, whole)


@_for(marks.CALL)
def called(plan: Planner, operation: Any) -> None:
    """Lets each replica call a function that communicates by itself."""
    given = [
        plan.local(x) if isinstance(plan.placement(x), Shard) or x.dtype.is_integer else plan.partial(x) for x in operation.inputs
    ]
    results = plan.program.call(marks.function_of(operation), given, [x.dtype for x in operation.outputs])
    for tensor, local in zip(operation.outputs, results, strict=True):
        plan.put(tensor, REPLICATE, local)


@rule(OF_OWN)
def of_own(plan: Planner, operation: Any) -> None:
    """Runs an operation on each replica's own values."""
    inputs = [plan.local(x) if isinstance(plan.placement(x), Own) else plan.replicated(x) for x in operation.inputs]
    handles = [x for x in operation.inputs if x.dtype == tf.resource]
    plan.emit(operation, inputs, OWN)
    if handles:
        (handle,) = handles
        node = plan.node_of(operation)
        node.has_effects = operation_definition(operation.type).is_stateful
        plan.access(plan.local(handle), node, writes=True)
