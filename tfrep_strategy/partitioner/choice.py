"""Which tensors are cut that are not of the batch: the choice of the planner, by what its plans cost.

A step may draw more rows of noise than its batch has, or compute on a grid of points. Where such a tensor is cut decides how fast
the step is, and never what it gives. So the planner looks for the work that comes of it, and that every replica does alike; if
that is much, it plans the step once more with the tensor cut, and keeps the cheaper plan. It emits nothing for that.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfrep_strategy.partitioner.placements import Items, Replicate, Rows, Shard, is_number
from tfrep_strategy.partitioner.planner import Planner, in_order
from tfrep_strategy.partitioner.program import Collective, live
from tfrep_strategy.partitioner.rules.contractions import CONTRACTIONS
from tfrep_strategy.partitioner.rules.drawing import DRAWS

_GUESSED_ROWS = 32
"""How many rows a batch is taken to have whose number the trace does not know."""

_COST_OF_SENDING = 32
"""Of one number, in operations: a core does some 10 a nanosecond, and processes of one machine send about a gigabyte a second."""

_COST_OF_A_ROUND = 400_000
"""Of one round of collectives, in operations: some 40 microseconds."""

_WORTH_A_PLAN = 0.1
"""Which part of all work must be alike on all replicas, so that the step is planned once more."""

_TRIED = 2
"""How many sizes are tried at most."""


def cheapest(planned: Callable[[Sequence[int]], Planner], graph: Any, whole: Sequence[Any], replicas: int) -> Planner:
    """Plans a step, with those tensors cut whose work is better divided.

    Args:
        planned: Plans it, given the sizes of further rows.
        graph: The traced step.
        whole: Its inputs that each replica gets whole.
        replicas: How many replicas share it.
    """
    best = planned([])
    if replicas < 2:
        return best
    for size in _worth_trying(best, graph, whole, replicas):
        other = planned([*best.beside, size])
        if _cost(other, graph, replicas) < _cost(best, graph, replicas):
            best = other
    return best


def _worth_trying(plan: Planner, graph: Any, whole: Sequence[Any], replicas: int) -> list[int]:
    """Returns the sizes of what may be cut, behind which there is much work that every replica does."""
    begin: dict[int, set[str]] = collections.defaultdict(set)
    for tensor in [*whole, *(op.outputs[0] for op in graph.get_operations() if op.type in DRAWS)]:
        if can_be_cut(plan, tensor) and tensor.shape[0] >= replicas:
            begin[tensor.shape[0]].add(tensor.name)
    if not begin:
        return []
    least = _WORTH_A_PLAN * sum(_work(plan, each, replicas) for each in graph.get_operations())
    behind = {size: _work_alike_behind(plan, graph, names, replicas) for size, names in begin.items()}
    return sorted((size for size, work in behind.items() if work > least), key=lambda size: -behind[size])[:_TRIED]


def can_be_cut(plan: Planner, tensor: Any) -> bool:
    """Returns whether a plan has a tensor whole, whose first axis could be that of rows."""
    is_number_of_rows = tensor.dtype.is_floating and bool(tensor.shape.rank) and (tensor.shape[0] or 0) > 1
    return is_number_of_rows and tensor.shape.is_fully_defined() and isinstance(plan.placement(tensor), Replicate)


def _work_alike_behind(plan: Planner, graph: Any, names: set[str], replicas: int) -> float:
    """Returns how much work needs some tensors, and is not divided."""
    behind, work = set(names), 0.0
    for operation in in_order(graph):
        if operation.outputs and any(x.name in behind for x in [*operation.inputs, *operation.outputs]):
            behind.update(x.name for x in operation.outputs)
            if not _is_divided(plan, operation):
                work += _work(plan, operation, replicas)
    return work


def _cost(plan: Planner, graph: Any, replicas: int) -> float:
    """Returns what a step costs a replica: what it computes, and what it sends."""
    returned = [x for x in graph.outputs if not isinstance(plan.placement(x), Replicate)]
    sent, rounds = sum(_elements(plan, x) for x in returned), {plan.local(x).level for x in returned}
    for each in live(plan.program.nodes, [plan.local(x) for x in graph.outputs]):
        if isinstance(each, Collective) and each.kind != "shared":
            rounds.add(each.level)
            for x in each.inputs:
                sent += math.prod(_GUESSED_ROWS if size is None else size for size in x.shape) if x.shape.rank is not None else 0
    work = sum(_work(plan, each, replicas) for each in graph.get_operations())
    return work + _COST_OF_SENDING * sent + _COST_OF_A_ROUND * len(rounds)


def _work(plan: Planner, operation: Any, replicas: int) -> float:
    """Returns how much a replica computes for an operation, in multiplications and additions, roughly."""
    if operation.name in plan.called:
        graph, inner = plan.called[operation.name]
        return sum(_work(inner, each, replicas) for each in graph.get_operations())
    sizes = [_elements(plan, x) for x in [*operation.inputs, *operation.outputs] if x.dtype.is_floating]
    work = max(sizes, default=0.0)
    if operation.type in CONTRACTIONS:  # Of matrices [m, k], [k, n] and [m, n]: exactly 2 m k n.
        work = 2 * math.sqrt(np.prod(sizes))
    return work / replicas if _is_divided(plan, operation) else work


def _is_divided(plan: Planner, operation: Any) -> bool:
    """Returns whether a replica does its part of an operation: that on its rows."""
    has_rows = [isinstance(plan.placement(x), (Shard, Items)) for x in operation.inputs if x.name in plan.values]
    results = [x for x in operation.outputs if x.name in plan.values]
    divides = [not isinstance(plan.placement(x), Replicate) or x.name in plan.whole for x in results]  # Or it was added up.
    return any(divides) and (any(has_rows) or operation.type in DRAWS)


def _elements(plan: Planner, tensor: Any) -> float:
    def number(size: Any) -> int:
        if isinstance(size, Rows):
            sizes = {rows: total for total, rows in plan.beside.items()}
            return size.per_row * (sizes.get(size.rows) or plan.traced_rows or _GUESSED_ROWS)
        return int(size) if is_number(size) else _GUESSED_ROWS

    return float(math.prod(map(number, plan.dims(tensor) or ())))
