"""The choice of tensors, other than the batch, that are sharded: the planner compares the costs of its plans.

A step may draw more rows of noise than its batch has, or compute on a grid of points. Sharding such tensors affects the speed of
the step, never its result. So the planner measures the work that depends on such a tensor and is replicated. If it is large, the
step is planned again with the tensor sharded, and the cheaper plan is kept. Only that plan is emitted.
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
"""Assumed number of rows of a batch if the trace does not know it."""

_COST_OF_SENDING = 32
"""Cost of one number, in operations: a core does about 10 a nanosecond, and processes on one machine send about 1 GB/s."""

_COST_OF_A_ROUND = 400_000
"""Cost of one round of collectives, in operations: about 40 microseconds."""

_WORTH_A_PLAN = 0.1
"""The share of all work that must be replicated to plan the step again."""

_TRIED = 2
"""The largest number of sizes that are tried."""


def cheapest(planned: Callable[[Sequence[int]], Planner], graph: Any, whole: Sequence[Any], replicas: int) -> Planner:
    """Plans a step, and shards those tensors whose work is better divided.

    Args:
        planned: Plans the step, given the sizes of further sharded tensors.
        graph: The traced step.
        whole: The inputs that each replica gets whole.
        replicas: Number of replicas.
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
    """Returns the sizes of tensors to shard, on which much replicated work depends."""
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
    """Returns whether a tensor is replicated in a plan and its first axis could be sharded."""
    is_number_of_rows = tensor.dtype.is_floating and bool(tensor.shape.rank) and (tensor.shape[0] or 0) > 1
    return is_number_of_rows and tensor.shape.is_fully_defined() and isinstance(plan.placement(tensor), Replicate)


def _work_alike_behind(plan: Planner, graph: Any, names: set[str], replicas: int) -> float:
    """Returns the replicated work that depends on some tensors."""
    behind, work = set(names), 0.0
    for operation in in_order(graph):
        if operation.outputs and any(x.name in behind for x in [*operation.inputs, *operation.outputs]):
            behind.update(x.name for x in operation.outputs)
            if not _is_divided(plan, operation):
                work += _work(plan, operation, replicas)
    return work


def _cost(plan: Planner, graph: Any, replicas: int) -> float:
    """Returns the cost of a step for one replica: computation and communication."""
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
    """Returns roughly the number of multiplications and additions of a replica for an operation."""
    if operation.name in plan.called:
        graph, inner = plan.called[operation.name]
        return sum(_work(inner, each, replicas) for each in graph.get_operations())
    sizes = [_elements(plan, x) for x in [*operation.inputs, *operation.outputs] if x.dtype.is_floating]
    work = max(sizes, default=0.0)
    if operation.type in CONTRACTIONS:  # For matrices [m, k], [k, n] and [m, n]: exactly 2 m k n.
        work = 2 * math.sqrt(np.prod(sizes))
    return work / replicas if _is_divided(plan, operation) else work


def _is_divided(plan: Planner, operation: Any) -> bool:
    """Returns whether a replica computes an operation for its own rows only."""
    has_rows = [isinstance(plan.placement(x), (Shard, Items)) for x in operation.inputs if x.name in plan.values]
    results = [x for x in operation.outputs if x.name in plan.values]
    divides = [not isinstance(plan.placement(x), Replicate) or x.name in plan.whole for x in results]  # Or it was reduced.
    return any(divides) and (any(has_rows) or operation.type in DRAWS)


def _elements(plan: Planner, tensor: Any) -> float:
    def number(size: Any) -> int:
        if isinstance(size, Rows):
            sizes = {rows: total for total, rows in plan.beside.items()}
            return size.per_row * (sizes.get(size.rows) or plan.traced_rows or _GUESSED_ROWS)
        return int(size) if is_number(size) else _GUESSED_ROWS

    return float(math.prod(map(number, plan.dims(tensor) or ())))
