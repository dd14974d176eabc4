"""A traced step of one device, which is planned, and run by the replicas of a process."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfrep_strategy.partitioner.rules  # noqa: F401  (registers the rules)
from tfrep_strategy.core.calls import line_of
from tfrep_strategy.partitioner.choice import can_be_cut, cheapest
from tfrep_strategy.partitioner.emitter import Emitter, Transport
from tfrep_strategy.partitioner.placements import (
    OF_LAYOUT,
    REPLICATE,
    WHOLE,
    Offset,
    Own,
    Partial,
    Parts,
    Placement,
    Replicate,
    Rows,
    Shard,
    Size,
)
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Collective, Node, Program, Tensor, every_node, live, prune, without
from tfrep_strategy.partitioner.rules.drawing import drawn_rows
from tfrep_strategy.partitioner.second_axis import BATCH, as_graph
from tfrep_strategy.partitioner.values import OwnRows


class Seen(NamedTuple):
    """The observable values of a traced tensor on each replica.

    Attributes:
        placement: Its placement.
        local: The index of the local tensor among the results of a replica.
        whole: The index of the whole tensor that a replica received; None if it was not needed.
    """

    placement: Placement
    local: int
    whole: int | None


@dataclasses.dataclass
class Observed:
    """The observable tensors of a graph.

    Attributes:
        seen: The tensors, by name.
        across: For a mesh of two axes: the placement, along the axis of the batch, of each observable tensor of a replica.
        own: The names of tensors whose value differs between replicas, and that one device does not have.
        calls: The graphs of called functions and their observable tensors, by the names of the calling operations.
    """

    seen: dict[str, Seen] = dataclasses.field(default_factory=dict)
    across: list[Placement] = dataclasses.field(default_factory=list)
    own: set[str] = dataclasses.field(default_factory=set)
    calls: dict[str, tuple[Any, Observed]] = dataclasses.field(default_factory=dict)


def observe(plan: Any, program: Program) -> tuple[Observed, list[Tensor]]:
    """Finds the traced tensors that a program computes anyway. Observing them sends and computes nothing.

    Args:
        plan: The `Planner` of the trace, after its run.
        program: Its program, pruned.

    Returns:
        The observable tensors, and the tensors of the program to return for them.
    """
    made = {x.name for node in live(program.nodes, program.results) for x in node.outputs}
    made.update(x.name for x in program.arguments)
    wanted: dict[str, int] = {}
    tensors: list[Tensor] = []

    def place_of(local: Tensor | None) -> int | None:
        if local is None or local.name not in made or local.dtype in (tf.resource, tf.variant):
            return None
        if local.name not in wanted:
            wanted[local.name] = len(tensors)
            tensors.append(local)
        return wanted[local.name]

    def of(plan: Any) -> Observed:
        found = Observed(calls={name: (graph, of(inner)) for name, (graph, inner) in plan.called.items()})
        for name, value in plan.values.items():
            if isinstance(value.placement, Own):
                found.own.add(name)
            if isinstance(value.placement, Parts):
                whole = place_of(plan.seen.get(name))
                if whole is not None:
                    found.seen[name] = Seen(REPLICATE, whole, None)
                continue
            local = place_of(value.local)
            if local is not None and isinstance(value.placement, (Replicate, Shard, Partial)):
                found.seen[name] = Seen(value.placement, local, place_of(plan.whole.get(name)))
        return found

    return of(plan), tensors


def observe_mesh(plan: Any, again: Any, program: Program) -> tuple[Observed, list[Tensor]]:
    """Finds the traced tensors that a program along both axes of a mesh computes anyway.

    Args:
        plan: The `Planner` of the trace, along the axis of the model.
        again: The `Planner` of the graph that followed from it.
        program: The program of the second, pruned.

    Returns:
        The observable tensors, with their placements along the axis of the model, and the tensors to return for them.
    """
    one, tensors = observe(again, program)
    found = Observed()
    indices: dict[tuple[int, Placement], int] = {}
    returned: list[Tensor] = []

    def place_of(seen: Seen) -> int:
        key = seen.local, seen.placement
        if key not in indices:
            indices[key] = len(returned)
            returned.append(tensors[seen.local])
            found.across.append(seen.placement)
        return indices[key]

    def of(plan: Any, into: Observed) -> Observed:
        into.calls = {name: (graph, of(inner, Observed())) for name, (graph, inner) in plan.called.items()}
        for name, value in plan.values.items():
            node = value.local.node
            if node is None or not isinstance(value.placement, (Replicate, Shard, Partial)):
                continue
            again_name = f"{node.name}:{_place(value.local)}"
            if again_name in one.own:
                into.own.add(name)
            elif (seen := one.seen.get(again_name)) is not None:
                into.seen[name] = Seen(value.placement, place_of(seen), None)
        return into

    return of(plan, found), returned


def returning(program: Program, more: Sequence[Tensor]) -> Program:
    """Returns a program that returns more of its tensors."""
    other = Program()
    other.arguments, other.nodes, other.results = program.arguments, program.nodes, [*program.results, *more]
    return other


_OF_PROCESS = frozenset({"container", "debug_name", "shared_name", "token"})
"""Attributes that refer to objects of a process."""


class _Line(NamedTuple):
    """A node of a program, with texts that must be equal on all ranks.

    Attributes:
        text: The operation, its attributes and constants.
        wired: A digest of this text, and of everything that the node is computed from.
        node: The node.
    """

    text: str
    wired: str
    node: Any


def digest(program: Program) -> bytes:
    """Returns a digest that is equal for programs that compute the same, in whatever order they were traced."""
    found = hashlib.sha256()
    for wired in sorted(line.wired for line in _lines(program)):
        found.update(wired.encode() + b"\n")
    return found.digest()


def lines(program: Program) -> list[tuple[str, str]]:
    """Returns, for each node of a program, a text that must be equal on all ranks, and a description for an error if it is not.

    The operations come first, then the operations with their inputs, in the order of the program.
    """
    consists, computed, whose = [], [], ""  # A node without a line of the user was added for a node behind it.
    for text, wired, node in reversed(list(_lines(program))):
        text_of_node, traced = _described(node), getattr(node, "traced", None)
        if traced is not None:
            whose = line_of(traced)
            text_of_node += f" at {whose}"
        elif whose:
            text_of_node += f", for {whose}"
        consists.append((text, text_of_node))
        computed.append((wired, f"{text_of_node}, of other inputs"))
    return sorted(consists, key=lambda line: line[1]) + computed[::-1]


def _lines(program: Program, inside: str = "") -> Iterator[_Line]:
    """Yields the nodes of a program. TensorFlow may trace parts of it in another order in each process."""
    wired: dict[int, str] = {}
    for node in live(program.nodes, program.results):
        text = (
            f"{inside}{node.kind} {node.axis}{node.group}"
            if isinstance(node, Collective)
            else f"{inside}{node.type} {_attributes(node)}"
        )
        given = [f"{wired[id(x.node)]} {_place(x)}" if x.node else f"{x.dtype} {x.shape}" for x in node.inputs]
        if getattr(node, "type", None) == "AddN":
            given.sort()
        waits = sorted(wired[id(x)] for x in node.control_inputs if id(x) in wired)
        bodies: list[str] = []
        for name, body in getattr(node, "bodies", ()):
            found = list(_lines(body, f"{inside}{name} "))
            bodies += sorted(line.wired for line in found)
            yield from found
        wired[id(node)] = hashlib.sha256("\n".join([text, *given, "after", *waits, *bodies]).encode()).hexdigest()
        yield _Line(text, wired[id(node)], node)


def _place(tensor: Any) -> int:
    """Returns the index of a tensor among the outputs of its node. Its name depends on all nodes of the process."""
    return next(place for place, each in enumerate(tensor.node.outputs) if each.name == tensor.name)


def _attributes(node: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(node.attributes.items()):
        if name not in _OF_PROCESS and value.WhichOneof("value") != "func" and not value.list.func:
            found.update(name.encode() + value.SerializeToString(deterministic=True))
    return found.hexdigest()


def _described(node: Any) -> str:
    if node is None:
        return "the end of the step"
    if isinstance(node, Collective):
        return f"a {node.kind} between replicas"
    if node.type != "Const":
        return str(node.type)
    value = tf.make_ndarray(node.attributes["value"].tensor)
    return f"the constant {np.array2string(value, threshold=8, edgeitems=2, separator=', ')}"


@dataclasses.dataclass(frozen=True)
class Given:
    """An input of a traced step.

    Attributes:
        placement: The placement of the batch, or of the value of a variable, among the replicas that have different rows.
        of_model: The placement among the replicas that have the same rows.
        is_shared: Whether it is a variable with one copy for all replicas of a process.
        dims: Its global shape, if more is known than in the trace.
        sizes: Its value, if it holds sizes: the shape, then all values.
        is_whole: Whether each replica gets all rows, and may take its own.
    """

    placement: Placement = REPLICATE
    of_model: Placement = REPLICATE
    is_shared: bool = False
    dims: tuple[Size, ...] | None = None
    sizes: tuple[Any, ...] | None = None
    is_whole: bool = False


class PartitionedStep:
    """A traced step of one device, as a program that each replica runs.

    Args:
        graph: The traced step, a `FuncGraph`.
        given: A description of each of its inputs.
        local_replicas: Number of replicas of a process.
        replicas: Number of all replicas.
        keeps_rows: Whether results that are rows of the batch stay sharded.
        compiled: Whether XLA compiles the operations between collectives.
        is_observed: Whether a run also returns the replicas' observable tensors, after the results.
        keeps_plan: Whether the planner stays, which takes memory.
        model_size: Number of consecutive replicas that have the same rows.

    Attributes:
        observed: The observable tensors.
        plan: The planner of the step, if it was to be kept.
        local_replicas: Number of replicas of a process.
        rows: Number of rows of the batch, if the step was traced for a number of them. If no input has rows, the number of rows
            for which the step draws most random numbers.
        writes: Whether it writes a variable among its inputs.
    """

    def __init__(
        self,
        graph: Any,
        given: Sequence[Given],
        local_replicas: int = 1,
        replicas: int = 1,
        keeps_rows: bool = False,
        compiled: bool = False,
        is_observed: bool = False,
        keeps_plan: bool = False,
        model_size: int = 1,
    ) -> None:
        self.graph = graph  # Keeps its functions alive.
        self._model_size, self._parts = model_size, replicas // model_size
        self._of_model: Any = None
        self.without_rule: dict[str, Any] = {}
        if model_size > 1:
            again, whole_rows = self._parts > 1, list(map(_of_model, graph.inputs, given))
            of_model = _planned(
                graph, whole_rows, 1 if again else local_replicas, model_size, of_model=True, is_planned_again=again
            )
            plan = of_model
            if again:
                graph, given = self._along_batch(plan, given)
        if self._parts > 1 or model_size == 1:
            whole = [tensor for tensor, each in zip(graph.inputs, given, strict=True) if each.is_whole]
            group = BATCH if model_size > 1 else ""
            plan = cheapest(
                lambda beside: _planned(graph, given, local_replicas, self._parts, beside, group), graph, whole, self._parts
            )
        program, self.rows, self._beside = plan.program, plan.traced_rows, list(plan.beside)
        self.placements: list[Placement] = []
        for tensor in graph.outputs:
            keeps = keeps_rows and (plan.placement(tensor) == Shard(0) or plan.can_be(tensor, Shard(0)))
            full = plan.agreed if tensor.shape.rank == 0 else plan.replicated  # Callbacks decide by scalars.
            program.results.append(plan.sharded(tensor, Shard(0)) if keeps else full(tensor))
            self.placements.append(Shard(0) if keeps else REPLICATE)
        self.program = program
        self.without_rule |= plan.without_rule
        self.plan = plan if keeps_plan else None
        self.writes = any(writes and handle.node is None and handle.name != "effects" for handle, writes in plan.accesses())
        self._placed = collections.Counter(type(value.placement).__name__ for value in plan.values.values())
        self.local_replicas = local_replicas
        prune(program)
        if self._of_model is not None:
            self._name_origins()
        self.observed, seen = Observed(), list[Tensor]()
        if is_observed:
            self.observed, seen = observe(plan, program) if self._of_model is None else observe_mesh(of_model, plan, program)
        self._emitter = Emitter(returning(program, seen), compiled)
        self._without_batch: Emitter | None = None

    @property
    def asks_for_start(self) -> bool:
        """Whether a replica needs to know the start of its rows."""
        return self._emitter.needs(self.program.arguments[0])

    def joined_rows(self, replicas: Sequence[Sequence[Any]], joined: Callable[[Placement, Sequence[Any]], Any]) -> list[list[Any]]:
        """Joins the observable tensors of replicas that have different rows of the batch.

        Args:
            replicas: The observable tensors of each replica.
            joined: Returns the whole of a tensor, given its placement and the tensor of each replica.

        Returns:
            The observable tensors along the axis of a mesh whose replicas have the same rows; all of them if it has one axis.
        """
        if self._of_model is None:
            return [list(own) for own in replicas]
        size = self._model_size
        across = list(enumerate(self.observed.across))
        return [[joined(placement, [own[i] for own in replicas[place::size]]) for i, placement in across] for place in range(size)]

    def named_in(self, text: str) -> list[Any]:
        """Returns the traced operations of the nodes that a TensorFlow error names."""
        names = set(re.findall(r"\{\{node ([^}]+)\}\}", text))
        return [node.traced for node in every_node(self.program) if node.name in names and node.traced is not None]

    @property
    def nodes(self) -> list[Any]:
        """The nodes that a replica runs, without unneeded ones."""
        return live(self.program.nodes, self.program.results)

    def digest(self) -> bytes:
        """Returns a digest that is equal for programs that compute the same."""
        return digest(self.program)

    def lines(self) -> list[tuple[str, str]]:
        """Returns, for each node, a text that must be equal on all ranks, and a description for an error if it is not."""
        return lines(self.program)

    def describe(self) -> list[str]:
        """Describes the placements of its tensors, and the communication, one round of collectives a line."""
        rounds: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for each in self.nodes:
            if isinstance(each, Collective) and each.kind != "shared":
                for x in each.inputs if each.kind == "call" else each.inputs[:1]:
                    along = f" along {each.group}" if each.group else ""
                    rounds[each.level][f"{each.kind} of {_size(x)}{along}"] += 1
            elif isinstance(each, Node) and each.talks:
                rounds[each.level][f"{each.type} that sends while it runs"] += 1
        kinds = {"Shard": "in rows", "Partial": "sums", "Replicate": "whole", "Own": "a replica's own", "Parts": "in parts"}
        placed = ", ".join(f"{self._placed[kind]} {told}" for kind, told in kinds.items() if self._placed[kind])
        lines = [f"Tensors: {placed}."]
        if self._beside:
            lines.append(f"Cut beside the batch: what has {' or '.join(map(str, self._beside))} rows.")
        for level, sent in sorted(rounds.items()):
            each = (f"{count} {what}" for what, count in sorted(sent.items()))
            lines.append(f"Round {level + 1}: {', '.join(each)}.")
        return lines

    def run(self, rows: Sequence[OwnRows], inputs: Sequence[Sequence[tf.Tensor]], transport: Transport) -> list[list[tf.Tensor]]:
        """Runs the step on the replicas of this process.

        Args:
            rows: The rows of each replica.
            inputs: The inputs of the traced step on each replica.
            transport: The communication between the replicas.

        Returns:
            The results of each replica.
        """
        arguments = [[*self._place(own), *given] for own, given in zip(rows, inputs, strict=True)]
        return self._emitter.run(arguments, transport)

    def _place(self, own: OwnRows) -> list[Any]:
        """Returns the first arguments of the program: those for the place of a replica in the mesh, and for its rows."""
        if self._model_size == 1:
            return [own.start, own.count, own.total, own.replica]
        along_model = [own.start, own.count, own.total, own.replica % self._model_size]
        if self._parts == 1:
            return along_model
        return [own.start, own.count, own.total, own.replica // self._model_size, *along_model]

    def _along_batch(self, plan: Planner, given: Sequence[Given]) -> tuple[Any, list[Given]]:
        """Returns the graph of a plan along the model's axis, and a description of each of its inputs."""
        for tensor in self.graph.outputs:
            plan.program.results.append((plan.agreed if tensor.shape.rank == 0 else plan.replicated)(tensor))
        prune(plan.program)
        self._of_model = as_graph(plan.program, self._model_size, self.graph)
        self.without_rule |= plan.without_rule
        start, count, total, replica = Given(), Given(), Given(sizes=((), Rows())), Given()
        return self._of_model, [start, count, total, replica, *map(_of_part, given)]

    def _name_origins(self) -> None:
        """Lets nodes, and operations without a rule, refer to the operations of the trace."""
        origin = self._of_model.origin
        for node in every_node(self.program):
            if node.traced is not None:
                node.traced = origin.get(node.traced.name)
        self.without_rule = {type_: origin.get(operation.name, operation) for type_, operation in self.without_rule.items()}

    def run_without_batch(self, replicas: Sequence[Any], inputs: Sequence[Sequence[Any]], transport: Transport) -> None:
        """Runs the part of a step that does not depend on a batch, such as counting steps.

        TensorFlow does the same when a step finds no more data: it stops only operations that wait for data.

        Args:
            replicas: The id of each replica of this process.
            inputs: As for `run`, with None for the inputs of the batch.
            transport: The communication between the replicas.
        """
        nowhere = [self._place(OwnRows(None, None, None, number)) for number in replicas]
        given = [[*place, *each] for place, each in zip(nowhere, inputs, strict=True)]
        if self._without_batch is None:
            missing = [own for own, each in zip(self.program.arguments, given[0], strict=True) if each is None]
            self._without_batch = Emitter(without(self.program, missing), compiled=False)
        self._without_batch.run(given, transport)


def _of_model(tensor: Any, given: Given) -> Given:
    """Returns how replicas that have the same rows get an input of a step."""

    def whole(size: Any) -> Any:
        return Rows(size.per_row, WHOLE) if isinstance(size, Rows) and not size.rows else size

    dims, sizes = given.dims, given.sizes
    if isinstance(given.placement, Shard) and given.placement.rows != OF_LAYOUT and dims is None and tensor.shape.rank:
        dims = (Rows(1, WHOLE) if tensor.shape[0] is None else tensor.shape[0], *tensor.shape[1:])
    return Given(
        given.of_model,
        is_shared=given.is_shared,
        dims=None if dims is None else tuple(None if isinstance(each, Offset) else whole(each) for each in dims),
        sizes=None if sizes is None else (sizes[0], *map(whole, sizes[1:])),
    )


def _of_part(given: Given) -> Given:
    """Returns how replicas that have different rows get an input, of which those with the same rows may have parts."""
    if not isinstance(given.of_model, Shard) or given.dims is None:
        return given
    axis, per_row = given.of_model.axis, given.of_model.per_row
    return dataclasses.replace(given, dims=tuple(per_row if i == axis else d for i, d in enumerate(given.dims)))


def _planned(
    graph: Any,
    given: Sequence[Given],
    local_replicas: int,
    replicas: int,
    beside: Sequence[int] = (),
    group: str = "",
    of_model: bool = False,
    is_planned_again: bool = False,
) -> Planner:
    """Plans a step in which tensors of these numbers of rows are sharded beside the batch."""
    program = Program(group)
    plan = Planner(program, OwnRows(*(program.argument(tf.int32, []) for _ in range(4))), local_replicas)
    plan.of_model, plan.is_planned_again = of_model, is_planned_again
    locals_ = [program.argument(tensor.dtype) for tensor in graph.inputs]
    for number in beside:
        plan.begin_rows(number, replicas)
    for tensor, each, local in zip(graph.inputs, given, locals_, strict=True):
        placement = each.placement
        if isinstance(placement, Shard) and placement.rows == OF_LAYOUT:
            plan.begin_layouts(replicas)
        elif isinstance(placement, Shard):
            plan.traced_rows = plan.traced_rows or tensor.shape[placement.axis]
        plan.put(tensor, placement, local)
        if each.is_whole and can_be_cut(plan, tensor) and tensor.shape[0] in plan.beside:
            placement = Shard(0, 1, plan.beside[tensor.shape[0]])
        if isinstance(placement, Shard) and (each.is_whole or placement != each.placement):
            plan.put(tensor, placement, plan.cut(local, placement, tensor.shape.rank))
            plan.whole[tensor.name] = local
        plan.value(tensor).is_shared = each.is_shared
        plan.note_sizes(tensor, each.sizes)
        if each.dims is not None:
            plan.known_dims[tensor.name] = list(each.dims)
    if plan.traced_rows is None and not of_model and not any(isinstance(each.placement, Shard) for each in given):
        plan.traced_rows = drawn_rows(graph)
    plan.run(graph)
    return plan


def _size(tensor: Any) -> str:
    """Describes the size of a tensor that is sent, or the size of each of its rows."""
    if tensor.shape.rank is None:
        return "unknown size"
    known = [size for size in tensor.shape if size is not None]
    size = f"{int(np.prod(known, dtype=np.int64)) * tensor.dtype.size} bytes"
    return size if len(known) == tensor.shape.rank else f"{size} a row"
