"""Which tensors of a traced step the program of a replica has, so that they can be compared with one device's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.partitioner.placements import Own, Partial, Placement, Replicate, Shard
from tfrep_strategy.partitioner.program import Program, Tensor, live


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
