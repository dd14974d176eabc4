"""Branches and loops. Their bodies are separate programs, planned with the placements of their inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import CannotPartitionError, message
from tfrep_strategy.partitioner.placements import (
    OWN,
    REPLICATE,
    Items,
    Own,
    Partial,
    Parts,
    Placement,
    Replicate,
    Rows,
    Shard,
    Size,
    Vacant,
    common_dims,
)
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import Node, Program, Tensor
from tfrep_strategy.partitioner.rules.lists import joined, joined_elements
from tfrep_strategy.partitioner.rules.row_loops import origin, over_rows
from tfrep_strategy.partitioner.values import Elements, OwnRows

ROWS = 4
"""The number of arguments of a body that describe a replica's rows. They come first."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The knowledge about an input of a body.

    Attributes:
        placement: Its placement.
        dims: Its global shape, as far as known.
        sizes: For a tensor of sizes: its shape, then all values.
        elements: For a list: the knowledge about its elements.
        is_shared: For a variable: whether all replicas of the process share it.
        has_whole: Whether the body gets the whole tensor as well.
        varies: Whether ranks may have computed different bits of it.
    """

    placement: Placement
    dims: tuple[Size, ...] | None = None
    sizes: tuple[Any, ...] | None = None
    elements: Elements | None = None
    is_shared: bool = False
    has_whole: bool = False
    varies: bool = False


def entry(plan: Planner, tensor: Any, has_whole: bool = False) -> Entry:
    """Returns the knowledge about a tensor. Rows that data have chosen enter and leave a body as whole tensors."""
    value, sizes, dims = plan.value(tensor), plan.sizes_of(tensor), plan.dims_held(tensor)
    placement = REPLICATE if isinstance(value.placement, Shard) and value.placement.rows > 0 else value.placement
    held = None if sizes is None else (sizes.shape, *map(_known_inside, sizes.ravel()))
    varies = value.local.varies and isinstance(value.placement, Replicate)
    known = None if dims is None else tuple(map(_known_inside, dims))
    return Entry(placement, known, held, value.elements, value.is_shared, has_whole, varies)


def result(plan: Planner, tensor: Any) -> Entry:
    """Returns the knowledge about a result of a body, outside it. Rows of a batch that begins in the body are whole outside."""
    known = entry(plan, tensor)
    if not plan.has_own_batch:
        return known
    in_rows = isinstance(known.placement, Items) or (isinstance(known.placement, Shard) and known.placement.rows == 0)

    def outside(sizes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if sizes is None else tuple(None if isinstance(size, Rows) and size.rows == 0 else size for size in sizes)

    return dataclasses.replace(
        known,
        placement=REPLICATE if in_rows else known.placement,
        dims=outside(known.dims),
        sizes=outside(known.sizes),
        elements=None if in_rows else known.elements,
    )


def _known_inside(size: Size) -> Size:
    return None if isinstance(size, Rows) and size.rows > 0 else size


def put_entry(plan: Planner, tensor: Any, known: Entry, local: Tensor) -> None:
    """Gives a tensor a local value, with the knowledge of an entry."""
    local.varies = known.varies
    plan.put(tensor, known.placement, local, is_shared=known.is_shared, elements=known.elements)
    plan.note_sizes(tensor, known.sizes)
    if known.dims is not None:
        plan.known_dims[tensor.name] = list(known.dims)


def planned(plan: Planner, graph: Any, entries: Sequence[Entry]) -> Planner:
    """Plans a body as a separate program.

    Its arguments are those for a replica's rows, its inputs, and the whole tensors of inputs.

    Args:
        plan: The plan of the surrounding program.
        graph: The traced body.
        entries: The knowledge about its inputs.
    """
    program = Program(plan.program.group)
    rows = OwnRows(*(program.argument(tf.int32, []) for _ in range(ROWS)))
    inner = Planner(program, rows, plan.local_replicas)
    inner.traced_rows = plan.traced_rows
    inner.of_model, inner.is_planned_again = plan.of_model, plan.is_planned_again
    if plan.parts_of_layouts:
        inner.begin_layouts(plan.parts_of_layouts)
    for tensor, each in zip(graph.inputs, entries, strict=True):
        put_entry(inner, tensor, each, program.argument(tensor.dtype))
    for tensor, each in zip(graph.inputs, entries, strict=True):
        if each.has_whole:
            inner.whole[tensor.name] = program.argument(tensor.dtype)
    inner.run(graph)
    return inner


def arguments(plan: Planner, locals_: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Returns the arguments for the program of a body."""
    rows = plan.rows
    return [rows.start, rows.count, rows.total, rows.replica, *locals_, *wholes]


def note_effects(plan: Planner, node: Node, given: Sequence[Tensor], inner: Sequence[Planner]) -> None:
    """Orders a loop, or branches, among all nodes that use the variables of their bodies.

    Args:
        plan: The plan of the surrounding program.
        node: The loop or the branches.
        given: The arguments of the bodies' programs.
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


@rule("If", "StatelessIf", "Case", "StatelessCase")
@always
def branches(plan: Planner, operation: Any) -> None:
    """Plans each branch. A result gets a placement that all branches can give."""
    is_if = operation.type.endswith("If")
    names = ["then_branch", "else_branch"] if is_if else ["branches"] * len(operation.get_attr("branches"))
    called = [operation.get_attr(name) for name in names] if is_if else operation.get_attr("branches")
    graphs = [plan.function(operation, each.name) for each in called]
    which, *given = operation.inputs
    if None in graphs:
        plan.replicate(operation)
        return
    for x in given:
        plan.settle_items(x, keeps_layouts=True)
    if isinstance(plan.placement(which), Own):
        chosen = plan.local(which)
        entries, locals_ = _before_each_takes_its_own(plan, given)
        bodies = [planned(plan, graph, entries) for graph in graphs]
        results = [Entry(OWN) for _ in operation.outputs]
    else:
        chosen = plan.agreed(which)
        entries, bodies = _planned(plan, given, graphs)
        locals_ = [plan.local(x) for x in given]
        results = [_either(bodies, outs) for outs in zip(*(graph.outputs for graph in graphs), strict=True)]
    for graph, body in zip(graphs, bodies, strict=True):
        body.program.results += [body.to(x, each.placement) for x, each in zip(graph.outputs, results, strict=True)]
    wholes = [plan.whole[x.name] for x, each in zip(given, entries, strict=True) if each.has_whole]
    inputs = arguments(plan, locals_, wholes)
    used = [i for i in range(len(inputs)) if any(body.program.uses(body.program.arguments[i]) for body in bodies)]
    for body in bodies:
        body.program.inputs = [body.program.arguments[i] for i in used]
    own = [inputs[i] for i in used]
    dtypes = {"Tin": [x.dtype for x in own], "Tout": [x.dtype for x in operation.outputs]}
    if is_if:
        dtypes["Tcond"] = chosen.dtype
    programs = [(name, body.program) for name, body in zip(names, bodies, strict=True)]
    node = plan.program.with_bodies(operation, [chosen, *own], programs, **dtypes)
    plan.put_node(operation, node)
    plan.bodies[operation.name] = list(zip(graphs, bodies, strict=True))
    note_effects(plan, node, inputs, bodies)
    for tensor, each, local in zip(operation.outputs, results, node.outputs, strict=True):
        put_entry(plan, tensor, each, local)


def _before_each_takes_its_own(plan: Planner, given: Sequence[Any]) -> tuple[list[Entry], list[Tensor]]:
    """Replicates all inputs before each replica takes its own branch, which cannot have collectives."""
    if any(isinstance(plan.placement(x), Parts) for x in given):
        hint = "read it before the branch, or leave out shard_weights."
        raise CannotPartitionError(message("Each replica takes its own branch, and one of them reads a sharded weight.", hint))
    locals_ = [plan.local(x) if isinstance(plan.placement(x), Own) or x.dtype == tf.resource else plan.replicated(x) for x in given]
    return [dataclasses.replace(entry(plan, x), placement=OWN) for x in given], locals_


def _planned(plan: Planner, given: Sequence[Any], graphs: Sequence[Any]) -> tuple[list[Entry], list[Planner]]:
    """Plans each branch. Tensors that all branches need whole are sent before; others are sent in the branch that needs them."""
    wanted: set[int] = set()
    while True:
        entries = [entry(plan, x, i in wanted or x.name in plan.whole) for i, x in enumerate(given)]
        bodies = [planned(plan, graph, entries) for graph in graphs]
        new = {
            i
            for i, each in enumerate(entries)
            if not each.has_whole
            and not isinstance(each.placement, Replicate)
            and all(graph.inputs[i].name in body.whole for graph, body in zip(graphs, bodies, strict=True))
        }
        if not new:
            return entries, bodies
        wanted |= new
        for i in new:
            plan.replicated(given[i])


def _either(bodies: Sequence[Planner], outs: Sequence[Any]) -> Entry:
    """Returns the common knowledge about a result, and a placement that every branch can give."""
    known = [result(body, tensor) for body, tensor in zip(bodies, outs, strict=True)]
    either = functools.reduce(
        lambda a, b: Entry(
            joined(a.placement, b.placement),
            common_dims(a.dims, b.dims),
            a.sizes if a.sizes == b.sizes else None,
            joined_elements(a.elements, b.elements),
            varies=a.varies or b.varies,
        ),
        known,
    )
    # A branch sends the rows of a result whose rank differs in another branch.
    can_be_sent = not isinstance(either.placement, Shard) or either.dims is not None or outs[0].dtype == tf.variant
    if can_be_sent and all(body.can_be(tensor, either.placement) for body, tensor in zip(bodies, outs, strict=True)):
        return either
    return dataclasses.replace(either, placement=REPLICATE)


@rule("While", "StatelessWhile")
@always
def loop(plan: Planner, operation: Any) -> None:
    """Plans a loop. Carried values get the placements that the body gives. All replicas make the same number of rounds.

    Values that do not change, and are needed whole, are sent before the loop.
    """
    test, body = (plan.function(operation, operation.get_attr(name).name) for name in ("cond", "body"))
    if test is None or body is None:
        plan.replicate(operation)
        return
    if over_rows(plan, operation, test, body):
        plan.bodies[operation.name] = [(test, None), (body, None)]
        return
    for x in operation.inputs:
        plan.settle_items(x, keeps_layouts=True)
    settled = _Loop(plan, operation, test, body)
    if settled.inner.without_rule:  # The loop would send rows in each round.
        plan.note_without_rule({operation.type: operation})
        settled = _Loop(plan, operation, test, body, is_whole=True)
    entries, inner, outer = settled.entries, settled.inner, settled.outer
    given = list(operation.inputs)
    inner.program.results += [
        inner.local(into) if is_fixed else inner.to(out, each.placement)
        for into, out, each, is_fixed in zip(body.inputs, body.outputs, entries, settled.fixed, strict=True)
    ]
    wholes = [i for i, each in enumerate(entries) if each.has_whole]
    inner.program.results += [inner.whole[body.inputs[i].name] for i in wholes]
    # If the body has collectives, all replicas must make the same number of rounds.
    ends = outer.agreed if inner.program.talks else outer.replicated
    outer.program.results.append(ends(test.outputs[0]))
    locals_ = [
        plan.local(x) if is_fixed and not isinstance(each.placement, Replicate) else plan.to(x, each.placement)
        for x, each, is_fixed in zip(given, entries, settled.fixed, strict=True)
    ]
    inputs = arguments(plan, locals_, [plan.replicated(given[i]) for i in wholes])
    inner.program.results[:0] = inner.program.arguments[:ROWS]
    becomes = [x.name for i, x in enumerate(inner.program.results) if settled.changes(i - ROWS)]
    used = [
        i
        for i, own in enumerate(inner.program.arguments)
        if settled.changes(i - ROWS)
        or own.name in becomes
        or any(each.program.needs(each.program.arguments[i]) for each in (inner, outer))
    ]
    inner.program.results = [inner.program.results[i] for i in used]
    for of_body in (inner, outer):
        of_body.program.inputs = [of_body.program.arguments[i] for i in used]
    own = [inputs[i] for i in used]
    programs = [("cond", outer.program), ("body", inner.program)]
    node = plan.program.with_bodies(operation, own, programs, T=[x.dtype for x in own])
    node.carried = [place for place, i in enumerate(used) if settled.changes(i - ROWS)]
    plan.put_node(operation, node)
    plan.bodies[operation.name] = [(test, outer), (body, inner)]
    note_effects(plan, node, inputs, [inner, outer])
    for i, (x, tensor) in enumerate(zip(given, operation.outputs, strict=True)):
        if settled.fixed[i]:
            plan.hand_over(plan, x, plan, tensor)
        else:
            put_entry(plan, tensor, entries[i], node.outputs[used.index(i + ROWS)])


class _Loop:
    """A loop whose body is planned repeatedly, until the placements of carried values settle.

    A replicated value becomes sharded or partial if the body gives that. A value is replicated for good if the next round needs
    another placement than the body gives. All choices are right, because the results of the body are converted to the placements
    that the loop carries. The choices affect only the cost.

    Args:
        plan: The planner.
        operation: The loop.
        test: Its traced condition.
        body: Its traced body.
        is_whole: Whether every replica computes all of it.

    Attributes:
        entries: The carried values.
        fixed: Which of them do not change.
        inner: The plan of the body.
        outer: The plan of the condition.
    """

    def __init__(self, plan: Planner, operation: Any, test: Any, body: Any, is_whole: bool = False) -> None:
        self._plan, self._given = plan, list(operation.inputs)
        self._body = body
        self.fixed = [origin(out) is into for into, out in zip(body.inputs, body.outputs, strict=True)]
        self.entries = [entry(plan, x) for x in self._given]
        self._pinned = [is_whole] * len(self.entries)
        if is_whole:
            self.entries = [
                each if x.dtype == tf.resource else dataclasses.replace(each, placement=REPLICATE)
                for x, each in zip(self._given, self.entries, strict=True)
            ]
        while True:
            self.inner, self.outer = planned(plan, body, self.entries), planned(plan, test, self.entries)
            new = [self._next(i, each, test) for i, each in enumerate(self.entries)]
            if new == self.entries:
                return
            self.entries = new

    def changes(self, place: int) -> bool:
        """Returns whether the loop changes the carried value of an index."""
        return 0 <= place < len(self.fixed) and not self.fixed[place]

    def _next(self, i: int, each: Entry, test: Any) -> Entry:
        into, out = self._body.inputs[i], self._body.outputs[i]
        is_wanted = into.name in self.inner.whole or test.inputs[i].name in self.outer.whole
        if self.fixed[i]:
            if not is_wanted or each.has_whole or isinstance(each.placement, Replicate):
                return each
            if isinstance(each.placement, Partial):
                return dataclasses.replace(each, placement=REPLICATE)
            return dataclasses.replace(each, has_whole=True)
        if is_wanted and isinstance(each.placement, Partial):
            self._pinned[i] = True
        given = result(self.inner, out)
        return Entry(
            self._placement(i, each.placement, given.placement),
            common_dims(each.dims, given.dims),
            each.sizes if each.sizes == given.sizes else None,
            joined_elements(each.elements, given.elements),
            each.is_shared,
            varies=each.varies or given.varies,
        )

    def _placement(self, i: int, now: Placement, given: Placement) -> Placement:
        """Returns the next placement of a carried value, given its placements before and after the round."""
        if self._pinned[i]:
            return REPLICATE
        if now == given or isinstance(given, Vacant):
            return now
        wanted = now if isinstance(given, Replicate) and not isinstance(now, Vacant) else given
        can_begin = self._plan.can_be(self._given[i], wanted)
        can_go_on = self.inner.can_be(self._body.outputs[i], wanted)
        is_free = isinstance(now, (Replicate, Vacant)) or now == wanted
        if is_free and can_begin and can_go_on:
            return wanted
        self._pinned[i] = True
        return REPLICATE
