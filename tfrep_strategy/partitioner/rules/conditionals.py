"""Branches: all replicas take the same one, unless the condition is a value of each replica's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.bodies import Entry, arguments, entry, note_effects, planned, put_entry, result
from tfrep_strategy.partitioner.placements import OWN, REPLICATE, Own, Replicate, Shard, common_dims
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import Tensor
from tfrep_strategy.partitioner.rules.lists import joined, joined_elements


@rule("If", "StatelessIf", "Case", "StatelessCase")
@always
def branches(plan: Planner, operation: Any) -> None:
    """Each branch is planned; a result is placed as both can give it."""
    is_if = operation.type.endswith("If")
    names = ["then_branch", "else_branch"] if is_if else ["branches"] * len(operation.get_attr("branches"))
    called = [operation.get_attr(name) for name in names] if is_if else operation.get_attr("branches")
    graphs = [plan.function(operation, each.name) for each in called]
    which, *given = operation.inputs
    if None in graphs:
        plan.replicate(operation)
        return
    for x in given:
        plan.settle_items(x)
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
    note_effects(plan, node, inputs, bodies)
    for tensor, each, local in zip(operation.outputs, results, node.outputs, strict=True):
        put_entry(plan, tensor, each, local)


def _before_each_takes_its_own(plan: Planner, given: Sequence[Any]) -> tuple[list[Entry], list[Tensor]]:
    """Sends all that replicas want whole, before each of them takes a branch of its own, in which nobody talks."""
    locals_ = [plan.local(x) if isinstance(plan.placement(x), Own) or x.dtype == tf.resource else plan.replicated(x) for x in given]
    return [dataclasses.replace(entry(plan, x), placement=OWN) for x in given], locals_


def _planned(plan: Planner, given: Sequence[Any], graphs: Sequence[Any]) -> tuple[list[Entry], list[Planner]]:
    """Plans each branch. What all of them want whole is sent before; what one of them sends besides is sent if it is taken."""
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
    """Returns what is known of a result, and the placement that every branch can give it."""
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
    # A branch sends the rows of what has another number of dimensions in another one.
    can_be_sent = not isinstance(either.placement, Shard) or either.dims is not None or outs[0].dtype == tf.variant
    if can_be_sent and all(body.can_be(tensor, either.placement) for body, tensor in zip(bodies, outs, strict=True)):
        return either
    return dataclasses.replace(either, placement=REPLICATE)
