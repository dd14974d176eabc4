"""Bodies of loops and branches: programs of their own, which are planned with the placements of what they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import REPLICATE, Items, Placement, Replicate, Rows, Shard, Size
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Node, Program, Tensor
from tfrep_strategy.partitioner.values import Elements, OwnRows

ROWS = 4
"""How many arguments of a body say which rows a replica has. They come first."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a body gets for one of its inputs.

    Attributes:
        placement: How it is placed.
        dims: Its global shape, as far as it is known.
        sizes: Its value, if it holds sizes: the shape, then all values.
        elements: If it is a list: what is known of its elements.
        is_shared: If it is a variable: whether all replicas of the process have this one.
        has_whole: Whether the body gets its whole, too.
        varies: Whether ranks may have computed other bits of it.
    """

    placement: Placement
    dims: tuple[Size, ...] | None = None
    sizes: tuple[Any, ...] | None = None
    elements: Elements | None = None
    is_shared: bool = False
    has_whole: bool = False
    varies: bool = False


def entry(plan: Planner, tensor: Any, has_whole: bool = False) -> Entry:
    """Returns what is known of a tensor. Rows that data have chosen are taken whole into a body, and out of it."""
    value, sizes, dims = plan.value(tensor), plan.sizes_of(tensor), plan.dims(tensor)
    placement = REPLICATE if isinstance(value.placement, Shard) and value.placement.rows else value.placement
    held = None if sizes is None else (sizes.shape, *map(_known_inside, sizes.ravel()))
    varies = value.local.varies and isinstance(value.placement, Replicate)
    known = None if dims is None else tuple(map(_known_inside, dims))
    return Entry(placement, known, held, value.elements, value.is_shared, has_whole, varies)


def result(plan: Planner, tensor: Any) -> Entry:
    """Returns what is known of a result of a body, outside of it. Rows of a batch that begins in the body are whole there."""
    known = entry(plan, tensor)
    if not plan.has_own_batch:
        return known
    in_rows = isinstance(known.placement, (Shard, Items))

    def outside(sizes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if sizes is None else tuple(None if isinstance(size, Rows) else size for size in sizes)

    return dataclasses.replace(
        known,
        placement=REPLICATE if in_rows else known.placement,
        dims=outside(known.dims),
        sizes=outside(known.sizes),
        elements=None if in_rows else known.elements,
    )


def _known_inside(size: Size) -> Size:
    return None if isinstance(size, Rows) and size.rows else size


def put_entry(plan: Planner, tensor: Any, known: Entry, local: Tensor) -> None:
    """Gives a tensor a value of which that is known."""
    local.varies = known.varies
    plan.put(tensor, known.placement, local, is_shared=known.is_shared, elements=known.elements)
    plan.note_sizes(tensor, known.sizes)
    if known.dims is not None:
        plan.known_dims[tensor.name] = list(known.dims)


def planned(plan: Planner, graph: Any, entries: Sequence[Entry]) -> Planner:
    """Plans a body as a program of its own.

    Its arguments are those that say which rows a replica has, its inputs, and the wholes of inputs.

    Args:
        plan: That of the program in which the body is.
        graph: The traced body.
        entries: What it gets.
    """
    program = Program()
    rows = OwnRows(*(program.argument(tf.int32, []) for _ in range(ROWS)))
    inner = Planner(program, rows, plan.local_replicas)
    inner.traced_rows = plan.traced_rows
    for tensor, each in zip(graph.inputs, entries, strict=True):
        put_entry(inner, tensor, each, program.argument(tensor.dtype))
    for tensor, each in zip(graph.inputs, entries, strict=True):
        if each.has_whole:
            inner.whole[tensor.name] = program.argument(tensor.dtype)
    inner.run(graph)
    return inner


def arguments(plan: Planner, locals_: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Returns what a body's program gets for its arguments."""
    rows = plan.rows
    return [rows.start, rows.count, rows.total, rows.replica, *locals_, *wholes]


def note_effects(plan: Planner, node: Node, given: Sequence[Tensor], inner: Sequence[Planner]) -> None:
    """Orders a loop, or branches, among all that use the variables that their bodies use.

    Args:
        plan: That of the program in which the node is.
        node: The loop or the branches.
        given: What the bodies' programs get for their arguments.
        inner: The plans of the bodies.
    """
    used: dict[str, tuple[Tensor, bool]] = {}
    for each in inner:
        plan.note_without_rule(each.without_rule)
        outer = {own.name: tensor for own, tensor in zip(each.program.arguments, given, strict=True)}
        for handle, writes in each.accesses():
            tensor = outer.get(handle.name, handle)
            used[tensor.name] = tensor, writes or used.get(tensor.name, (tensor, False))[1]
    for tensor, writes in used.values():
        plan.access(tensor, node, writes)
        node.has_effects = node.has_effects or writes
