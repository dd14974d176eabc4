"""A traced step of one device, planned, and run by the replicas of a process."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfrep_strategy.partitioner.rules  # noqa: F401  (registers them)
from tfrep_strategy.communicators.peers.reports import user_line
from tfrep_strategy.partitioner.choice import can_be_cut, cheapest
from tfrep_strategy.partitioner.emitter import Emitter, Transport
from tfrep_strategy.partitioner.placements import REPLICATE, Own, Partial, Placement, Replicate, Shard, Size
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Collective, Node, Program, Tensor, every_node, live, prune, without
from tfrep_strategy.partitioner.rules.drawing import drawn_rows
from tfrep_strategy.partitioner.values import OwnRows


class Seen(NamedTuple):
    """A tensor of the trace that each replica has.

    Attributes:
        placement: How it is placed.
        local: The place among the results of a replica of what it holds.
        whole: The place of the whole that a replica got of it; None if nothing has asked for that.
    """

    placement: Placement
    local: int
    whole: int | None


@dataclasses.dataclass
class Observed:
    """What can be seen of a graph.

    Attributes:
        seen: By the name of a tensor.
        own: The names of what each replica has a value of its own for, which one device does not have.
        calls: By the name of an operation that calls a function: the function's graph, and what can be seen of it.
    """

    seen: dict[str, Seen] = dataclasses.field(default_factory=dict)
    own: set[str] = dataclasses.field(default_factory=set)
    calls: dict[str, tuple[Any, Observed]] = dataclasses.field(default_factory=dict)


def observe(plan: Any, program: Program) -> tuple[Observed, list[Tensor]]:
    """Finds the tensors of a trace that a program computes anyway: nothing is sent or computed to see them.

    Args:
        plan: The `Planner` of the trace, after it has run.
        program: Its program, pruned.

    Returns:
        What can be seen, and the tensors of the program that have to be returned for it.
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
            local = place_of(value.local)
            if local is not None and isinstance(value.placement, (Replicate, Shard, Partial)):
                found.seen[name] = Seen(value.placement, local, place_of(plan.whole.get(name)))
        return found

    return of(plan), tensors


def returning(program: Program, more: Sequence[Tensor]) -> Program:
    """Returns a program that returns more of what it computes."""
    other = Program()
    other.arguments, other.nodes, other.results = program.arguments, program.nodes, [*program.results, *more]
    return other


_OF_PROCESS = frozenset({"container", "debug_name", "shared_name", "token"})
"""Attributes that name something of a process."""


class _Line(NamedTuple):
    """A node of a program: what must be equal on all ranks, and the node.

    Attributes:
        text: Of the operation, its attributes and constants.
        wired: Of that, and of all that it is computed from.
        node: The node.
    """

    text: str
    wired: str
    node: Any


def digest(program: Program) -> bytes:
    """Returns what is equal for programs that compute the same, in whatever order they were traced."""
    found = hashlib.sha256()
    for wired in sorted(line.wired for line in _lines(program)):
        found.update(wired.encode() + b"\n")
    return found.digest()


def lines(program: Program) -> list[tuple[str, str]]:
    """Returns for each node of a program what must be equal on all ranks, and what to tell of it where it is not.

    What a program consists of comes first, then what each of it is computed from, in the order of the program.
    """
    consists, computed, whose = [], [], ""  # What has no line of its own was added for what comes after it.
    for text, wired, node in reversed(list(_lines(program))):
        told, traced = _told(node), getattr(node, "traced", None)
        if traced is not None:
            whose = line_of(traced)
            told += f" at {whose}"
        elif whose:
            told += f", for {whose}"
        consists.append((text, told))
        computed.append((wired, f"{told}, of other inputs"))
    return sorted(consists, key=lambda line: line[1]) + computed[::-1]


def line_of(operation: Any) -> str:
    """Returns the line of the user's program that has made an operation of a trace."""
    return user_line((frame.filename, frame.lineno) for frame in reversed(operation.traceback))


def _lines(program: Program, inside: str = "") -> Iterator[_Line]:
    """Yields what a program consists of. TensorFlow may trace parts of it in another order in each process."""
    wired: dict[int, str] = {}
    for node in live(program.nodes, program.results):
        text = f"{inside}{node.kind} {node.axis}" if isinstance(node, Collective) else f"{inside}{node.type} {_attributes(node)}"
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
    """Returns which output of its node a tensor is. Its name counts all nodes of the process."""
    return next(place for place, each in enumerate(tensor.node.outputs) if each is tensor)


def _attributes(node: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(node.attributes.items()):
        if name not in _OF_PROCESS and value.WhichOneof("value") != "func" and not value.list.func:
            found.update(name.encode() + value.SerializeToString(deterministic=True))
    return found.hexdigest()


def _told(node: Any) -> str:
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
    """What is given for an input of a traced step.

    Attributes:
        placement: Of a batch, or of what a variable holds.
        is_shared: Whether it is a variable of which all replicas of a process use one copy.
        dims: Its global shape, if more is known than the trace tells.
        sizes: Its value, if it holds sizes: the shape, then all values.
        is_whole: Whether each replica gets all rows, of a batch or of another tensor, and may take its own.
    """

    placement: Placement = REPLICATE
    is_shared: bool = False
    dims: tuple[Size, ...] | None = None
    sizes: tuple[Any, ...] | None = None
    is_whole: bool = False


class PartitionedStep:
    """A traced step of one device as a program that each replica runs.

    Args:
        graph: The traced step, a `FuncGraph`.
        given: How each of its inputs is given.
        local_replicas: How many replicas a process runs.
        replicas: How many there are in all.
        keeps_rows: Whether results that are rows of the batch stay on the replicas that have them.
        compiled: Whether XLA compiles what lies between collectives.
        is_observed: Whether a run also returns what each replica has of the tensors of the trace, behind the results.

    Attributes:
        observed: Which of them.
        local_replicas: How many replicas a process runs.
        rows: How many rows the batch has, if the step was traced for a number of them. If nothing that is given has rows, those
            are meant of which the step draws most numbers.
        writes: Whether it writes a variable that it is given.
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
    ) -> None:
        whole = [tensor for tensor, each in zip(graph.inputs, given, strict=True) if each.is_whole]
        plan = cheapest(lambda beside: _planned(graph, given, local_replicas, replicas, beside), graph, whole, replicas)
        program, self.rows, self._beside = plan.program, plan.traced_rows, list(plan.beside)
        self.placements: list[Placement] = []
        for tensor in graph.outputs:
            keeps = keeps_rows and (plan.placement(tensor) == Shard(0) or plan.can_be(tensor, Shard(0)))
            full = plan.agreed if tensor.shape.rank == 0 else plan.replicated  # Callbacks decide by scalars.
            program.results.append(plan.sharded(tensor, Shard(0)) if keeps else full(tensor))
            self.placements.append(Shard(0) if keeps else REPLICATE)
        self.program, self.without_rule = program, plan.without_rule
        self.writes = any(writes and handle.node is None and handle.name != "effects" for handle, writes in plan.accesses())
        self._placed = collections.Counter(type(value.placement).__name__ for value in plan.values.values())
        self.local_replicas = local_replicas
        self.graph = graph  # With it, its functions would end.
        prune(program)
        self.observed, seen = observe(plan, program) if is_observed else (Observed(), [])
        self._emitter = Emitter(returning(program, seen), compiled)
        self._without_batch: Emitter | None = None

    @property
    def asks_for_start(self) -> bool:
        """Whether a replica has to know where its rows begin."""
        return self._emitter.needs(self.program.arguments[0])

    def named_in(self, text: str) -> list[Any]:
        """Returns the traced operations for which the nodes stand that an error of TensorFlow names."""
        names = set(re.findall(r"\{\{node ([^}]+)\}\}", text))
        return [node.traced for node in every_node(self.program) if node.name in names and node.traced is not None]

    @property
    def nodes(self) -> list[Any]:
        """What a replica computes and sends, but for what nothing needs."""
        return live(self.program.nodes, self.program.results)

    def digest(self) -> bytes:
        """Returns what is equal for programs that consist of the same operations and constants."""
        return digest(self.program)

    def lines(self) -> list[tuple[str, str]]:
        """Returns for each node what must be equal on all ranks, and what to tell of it where it is not."""
        return lines(self.program)

    def describe(self) -> list[str]:
        """Says where its tensors are, and what replicas send, a line for each round of collectives."""
        rounds: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for each in self.nodes:
            if isinstance(each, Collective) and each.kind != "shared":
                for x in each.inputs:
                    rounds[each.level][f"{each.kind} of {_size(x)}"] += 1
            elif isinstance(each, Node) and each.talks:
                rounds[each.level][f"{each.type} that sends while it runs"] += 1
        kinds = {"Shard": "in rows", "Partial": "sums", "Replicate": "whole", "Own": "a replica's own"}
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
            rows: Which rows each replica has.
            inputs: What each replica gives for the inputs of the traced step.
            transport: How the replicas talk.

        Returns:
            The results of each replica.
        """
        arguments = [[own.start, own.count, own.total, own.replica, *given] for own, given in zip(rows, inputs, strict=True)]
        return self._emitter.run(arguments, transport)

    def run_without_batch(self, replicas: Sequence[Any], inputs: Sequence[Sequence[Any]], transport: Transport) -> None:
        """Does what a step does that needs nothing of a batch, such as counting steps.

        TensorFlow does so when a step finds no more data, since it stops what waits for data, and nothing else.

        Args:
            replicas: The number of each replica of this process.
            inputs: As for `run`, with None for what belongs to the batch.
            transport: How the replicas talk.
        """
        given = [[None, None, None, number, *each] for number, each in zip(replicas, inputs, strict=True)]
        if self._without_batch is None:
            missing = [own for own, each in zip(self.program.arguments, given[0], strict=True) if each is None]
            self._without_batch = Emitter(without(self.program, missing), compiled=False)
        self._without_batch.run(given, transport)


def _planned(graph: Any, given: Sequence[Given], local_replicas: int, replicas: int, beside: Sequence[int]) -> Planner:
    """Plans a step, in which so many rows are cut beside those of the batch."""
    program = Program()
    plan = Planner(program, OwnRows(*(program.argument(tf.int32, []) for _ in range(4))), local_replicas)
    locals_ = [program.argument(tensor.dtype) for tensor in graph.inputs]
    for number in beside:
        plan.begin_rows(number, replicas)
    for tensor, each, local in zip(graph.inputs, given, locals_, strict=True):
        placement = each.placement
        if isinstance(placement, Shard):
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
    if plan.traced_rows is None and not any(isinstance(each.placement, Shard) for each in given):
        plan.traced_rows = drawn_rows(graph)
    plan.run(graph)
    return plan


def _size(tensor: Any) -> str:
    """Says how large a tensor is that is sent, or how large each of its rows."""
    if tensor.shape.rank is None:
        return "unknown size"
    known = [size for size in tensor.shape if size is not None]
    told = f"{int(np.prod(known, dtype=np.int64)) * tensor.dtype.size} bytes"
    return told if len(known) == tensor.shape.rank else f"{told} a row"
