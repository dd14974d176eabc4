"""Makes rules wrong, to see whether that is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tfrep_strategy.partitioner import planner, values
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from tfrep_strategy.partitioner.program import Collective, Program
from tfrep_strategy.partitioner.rules import drawing

MUTATIONS: dict[str, Callable[[Placement], Placement]] = {
    "a sum is taken for a whole": lambda p: REPLICATE if isinstance(p, Partial) else p,
    "rows are taken for a whole": lambda p: REPLICATE if isinstance(p, Shard) else p,
    "an axis is off by one": lambda p: Shard(p.axis + 1, p.per_row) if isinstance(p, Shard) else p,
    "a whole is taken for a sum": lambda p: PARTIAL if isinstance(p, Replicate) else p,
}


def mutated(monkeypatch: pytest.MonkeyPatch, change: Callable[[Placement], Placement], types: Collection[str] | None) -> list[str]:
    """Has rules give the results of operations another placement than they mean.

    Args:
        monkeypatch: Ends it.
        change: What becomes of a placement.
        types: Of which operations; None: of all. Others, and what is computed of wholes alone, stay as they are.

    Returns:
        The names of the tensors that were changed, as they are.
    """
    original, changed = planner.Planner.put, list[str]()

    def put(plan: Any, tensor: Any, placement: Placement, *args: Any, **details: Any) -> None:
        if (
            (types is None or tensor.op.type in types)
            and (tensor.dtype.is_floating or tensor.dtype.is_complex)
            and any(not isinstance(plan.placement(x), Replicate) for x in tensor.op.inputs)
            and change(placement) != placement
        ):
            changed.append(tensor.name)
            placement = change(placement)
        original(plan, tensor, placement, *args, **details)

    monkeypatch.setattr(planner.Planner, "put", put)
    monkeypatch.setattr(planner.Planner, "_from_whole_inputs", lambda *_: None)  # To compute it again would mend it.
    return changed


def _mean(plan: Any, whole: Any, value: Any) -> Any:
    if not isinstance(value.placement, Partial):
        return None
    return plan.program.add("RealDiv", whole, plan.program.constant(2, whole.dtype))


def _lost(plan: Any, whole: Any, value: Any) -> Any:
    if not isinstance(value.placement, Partial):
        return None
    add, own = plan.program.add, value.local
    return plan.program.send("sum", add("SelectV2", add("Equal", plan.rows.replica, 0), own, add("ZerosLike", own)))


def _swapped(plan: Any, whole: Any, value: Any) -> Any:
    if not isinstance(value.placement, Shard):
        return None
    return plan.program.add("Roll", whole, plan.rows.count, plan.program.constant(value.placement.axis))


def _stale(plan: Any, whole: Any, value: Any) -> Any:
    add = plan.program.add
    return add("SelectV2", add("Equal", plan.rows.replica, 0), whole, add("ZerosLike", whole))


TALK: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a mean is taken for a sum": _mean,
    "a part is lost": _lost,
    "ranks are swapped": _swapped,
    "a copy is stale": _stale,
}
"""What becomes of a whole that replicas have sent each other, given the plan, the whole, and what it was made of."""


def misled(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any, Any], Any], which: int) -> list[str]:
    """Has replicas get another whole than they have sent each other.

    Args:
        monkeypatch: Ends it.
        change: One of `TALK`.
        which: How many that could be changed are left as they are.

    Returns:
        The name of the tensor that was changed, once it is.
    """
    original, seen, changed = values.Values.replicated, set[str](), list[str]()

    def replicated(plan: Any, tensor: Any, sum_as: str = "sum") -> Any:
        value, whole = plan.value(tensor), original(plan, tensor, sum_as)
        if not isinstance(whole.node, Collective) or not whole.dtype.is_floating or tensor.name in seen or changed:
            return whole
        wrong = change(plan, whole, value)
        if wrong is None:
            return whole
        seen.add(tensor.name)
        if len(seen) <= which:
            return whole
        changed.append(tensor.name)
        wrong.shape = whole.shape
        plan.whole[tensor.name] = wrong
        if isinstance(value.placement, Partial):
            plan.values[tensor.name] = dataclasses.replace(plan.value(tensor), local=wrong)
        return wrong

    monkeypatch.setattr(values.Values, "replicated", replicated)
    return changed


def with_operands_swapped(monkeypatch: pytest.MonkeyPatch, type_: str) -> list[str]:
    """Has the first operation of a type get its two operands in the other order. Returns the name of its result."""
    original, changed = Program.copy_of, list[str]()

    def copy_of(program: Any, operation: Any, inputs: Any, *args: Any, **changes: Any) -> Any:
        if operation.type == type_ and (not changed or operation.outputs[0].name in changed):
            changed.append(operation.outputs[0].name)
            inputs = list(inputs)[::-1]
        return original(program, operation, inputs, *args, **changes)

    monkeypatch.setattr(Program, "copy_of", copy_of)
    return changed


def with_draws_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each replica draw the numbers of the first rows."""
    monkeypatch.setattr(drawing, "_counted_on", lambda plan, counter, turns: counter)


def with_updates_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all replicas add to variables twice what they should."""
    original = planner.Planner.add_write

    def add_write(plan: Any, operation: Any, inputs: Any) -> None:
        handle, new = inputs
        original(plan, operation, [handle, plan.program.add("AddV2", new, new)])

    monkeypatch.setattr(planner.Planner, "add_write", add_write)


def with_an_update_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has replicas but the first add nothing to variables."""
    original = planner.Planner.add_write

    def add_write(plan: Any, operation: Any, inputs: Any) -> None:
        handle, new = inputs
        if operation.type in ("AssignAddVariableOp", "AssignSubVariableOp") and new.dtype.is_floating:
            add = plan.program.add
            new = add("SelectV2", add("Equal", plan.rows.replica, 0), new, add("ZerosLike", new))
        original(plan, operation, [handle, new])

    monkeypatch.setattr(planner.Planner, "add_write", add_write)
