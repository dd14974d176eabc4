"""A mesh of two axes: a step that was planned along one axis becomes a graph again, and is planned along the other.

Replicas along the axis "model" have the same rows of the batch, and parts of the weights. The step is planned along it first, as
if each replica had all rows. In the graph of that program, a collective is an operation of one replica with a mark. Its rule says
which rows and sums pass through it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import function_graph
from tfrep_strategy.errors import CannotPartitionError, message
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.emitter import Segment
from tfrep_strategy.partitioner.program import Collective, Node, Program, attribute, every_node, live

BATCH, MODEL = "batch", "model"
"""The groups of a collective along either axis."""

_KIND, _AXIS = "_tfrep_kind", "_tfrep_axis"


def as_graph(program: Program, size: int, traced: Any) -> Any:
    """Returns the program of a replica as a graph. The program cannot be used afterwards.

    Args:
        program: The program, along the axis "model".
        size: The number of replicas along it.
        traced: The graph that was planned.

    Returns:
        A `FuncGraph` whose inputs are the arguments of the program. Its attribute `origin` has the traced operations by the names
        of the graph's.

    Raises:
        CannotPartitionError: The program calls a function that communicates by itself.
    """
    for each in [program, *_bodies(program)]:
        _replace_collectives(each, size)
    nodes = live(program.nodes, program.results)
    whole = Segment(nodes, program.results, inputs=program.arguments)
    functions: dict[str, Any] = {}
    scope = traced
    while hasattr(scope, "_functions"):
        functions = scope._functions | functions
        scope = getattr(scope, "outer_graph", None)
    graph = _graph_of(whole, nodes, functions)
    graph.origin = dict(_origins(program))
    graph.segment = whole  # Keeps its functions registered.
    return graph


def collective_of(operation: Any) -> tuple[str, int]:
    """Returns the kind and the axis of the collective that a marked operation stands for."""
    attributes = operation.node_def.attr
    return attributes[_KIND].s.decode(), attributes[_AXIS].i


def _origins(program: Program) -> Iterator[tuple[str, Any]]:
    """Yields the names of nodes with their traced operations. A node without one was added for a node behind it."""
    behind = None
    for node in reversed(list(every_node(program))):
        behind = node.traced or behind
        if behind is not None:
            yield node.name, behind


def _bodies(program: Program) -> Iterator[Program]:
    for node in program.nodes:
        for _, body in getattr(node, "bodies", ()):
            yield body
            yield from _bodies(body)


def _replace_collectives(program: Program, size: int) -> None:
    """Puts an operation that has a result of the same shape in the place of each collective."""
    made: dict[int, Node] = {}
    nodes: list[Any] = []

    def add(type_: str, *inputs: Any, **attributes: Any) -> Node:
        before = len(program.nodes)
        result = program.add(type_, *inputs, **attributes)
        nodes.extend(program.nodes[before:])
        return result.node

    for node in list(program.nodes):
        if isinstance(node, Collective):
            x, mark = node.inputs[0], {marks.NAME: marks.WITHIN, _KIND: node.kind, _AXIS: node.axis}
            if node.kind in ("gather", "slices"):
                carrier = add("ConcatV2", [x] * size, node.axis, **mark)
            elif node.kind == "equal rows":
                carrier = add("Pack", [x] * size, axis=0, **mark)
            elif node.kind in ("sum", "gradient", "first"):
                carrier = add("Identity", x, **mark)
            else:
                hint = "leave out gradient_aggregator and shard_optimizer_state, or make one axis of the mesh of size 1."
                raise CannotPartitionError(message("Replicas in a mesh of two axes cannot communicate so.", hint, kind=node.kind))
            made[id(node)] = carrier
            carrier.control_inputs = [each.node for each in node.inputs[1:] if each.node is not None]
            carrier.outputs[0].shape = node.outputs[0].shape
            carrier.outputs = node.outputs
            node.outputs[0].name, node.outputs[0].node = f"{carrier.name}:output:0", carrier
        else:
            nodes.append(node)
    for node in nodes:
        if node.control_inputs:
            node.control_inputs = [made.get(id(each), each) for each in node.control_inputs]
            node.attributes["_has_manual_control_dependencies"] = attribute(True)
    program.nodes = nodes


def _graph_of(segment: Segment, nodes: Sequence[Node], functions: dict[str, Any]) -> Any:
    """Returns the graph of a segment of some nodes, with those of its bodies."""
    graph = function_graph(segment.function([[""]], 0))
    graph._functions = dict(functions)
    bodies = [body for node in nodes for _, body in node.bodies]
    for body, program in zip(segment.bodies, bodies, strict=True):
        inner = _graph_of(body, live(program.nodes, program.results), functions)
        graph._functions[body.function([[""]], 0)] = _Function(inner)
    for node in nodes:
        for result, tensor in zip(graph.get_operation_by_name(node.name).outputs, node.outputs, strict=True):
            if tensor.dtype not in (tf.variant, tf.resource):
                result.set_shape(tensor.shape)
    return graph


class _Function:
    """A function of a graph, as the planner looks it up."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
