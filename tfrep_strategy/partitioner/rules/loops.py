"""Loops: a body is planned with the placements of what a loop carries, until these stand."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.bodies import ROWS, Entry, arguments, entry, note_effects, planned, put_entry, result
from tfrep_strategy.partitioner.placements import REPLICATE, Partial, Placement, Replicate, Vacant, common_dims
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.rules.lists import joined_elements
from tfrep_strategy.partitioner.rules.row_loops import origin, over_rows


@rule("While", "StatelessWhile")
@always
def loop(plan: Planner, operation: Any) -> None:
    """What a loop carries is placed as its body gives it. All replicas make the same number of rounds.

    What does not change, and is wanted whole, is sent before the loop.
    """
    test, body = (plan.function(operation, operation.get_attr(name).name) for name in ("cond", "body"))
    if test is None or body is None:
        plan.replicate(operation)
        return
    if over_rows(plan, operation, test, body):
        return
    for x in operation.inputs:
        plan.settle_items(x)
    settled = _Loop(plan, operation, test, body)
    if settled.inner.without_rule:  # It would send rows in each round.
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
    # Replicas that talk in the body make the same rounds.
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
    note_effects(plan, node, inputs, [inner, outer])
    for i, (x, tensor) in enumerate(zip(given, operation.outputs, strict=True)):
        if settled.fixed[i]:
            plan.hand_over(plan, x, plan, tensor)
        else:
            put_entry(plan, tensor, entries[i], node.outputs[used.index(i + ROWS)])


class _Loop:
    """A loop whose body was planned until the placements of what it carries stand.

    Each placement only goes down: what is free becomes a shard or a sum if the body gives that; what the next round wants otherwise
    than the body gives it is replicated, and stays so. All choices are right, since what the body gives is brought to what the
    loop carries. They are about what it costs.

    Args:
        plan: The planner.
        operation: The loop.
        test: Its traced condition.
        body: Its traced body.
        is_whole: Whether every replica computes all of it.

    Attributes:
        entries: What the loop carries.
        fixed: Which of it does not change.
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
        """Returns whether the loop changes what it carries in a place."""
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
        """Returns the placement of what is carried, given what it was in this round and what it is behind it."""
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
