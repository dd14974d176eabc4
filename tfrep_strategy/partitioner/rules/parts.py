"""Tensors in parts: the values of sharded weights, and what is computed from them element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import CannotPartitionError, message
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import Parts, Replicate
from tfrep_strategy.partitioner.planner import OF_PARTS, Planner, always, rule

_WRITES = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"})

_OF_HANDLES = _WRITES | {
    "Case", "If", "ReadVariableOp", "StatelessCase", "StatelessIf", "StatelessWhile", "VariableShape", "While",
}  # fmt: skip
"""Operations that may have the handle of a sharded weight."""

_BY_ELEMENTS = frozenset({
    "Abs", "Add", "AddN", "AddV2", "Cast", "DivNoNan", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Sign", "Sqrt", "Square",
    "Sub",
})  # fmt: skip
"""Operations whose results stay in parts. Others of this kind are computed on the whole."""


@rule(OF_PARTS)
@always
def of_parts(plan: Planner, operation: Any) -> None:
    """Keeps parts where an element of the result depends on the same element of the operands; else gathers the whole."""
    handles = [x for x in operation.inputs if x.dtype == tf.resource and isinstance(plan.placement(x), Parts)]
    if handles and operation.type not in _OF_HANDLES:
        raise CannotPartitionError(
            message(
                "An operation reads or writes rows of a sharded weight, and has no rule.",
                hint="read the whole with tf.convert_to_tensor, assign the whole, or leave out shard_weights.",
                operation=f"{operation.type} {operation.name!r}",
            )
        )
    if operation.type in _WRITES or marks.mark_of(operation) == marks.OWN_ROW:
        plan.plan_by_rule(operation)
    elif not _keeps(plan, operation):
        plan.plan_with_whole(operation)


def _keeps(plan: Planner, operation: Any) -> bool:
    """Plans an operation whose result stays in parts; returns False for others."""
    waits = "_has_manual_control_dependencies" in operation.node_def.attr
    if waits or marks.mark_of(operation) is not None or len(operation.outputs) != 1:
        return False
    if operation.type in _BY_ELEMENTS:
        return _keeps_elements(plan, operation)
    x, (result,) = operation.inputs[0], operation.outputs
    placement = plan.placement(x)
    if operation.type not in _MOVES or not isinstance(placement, Parts) or not result.shape.is_fully_defined():
        return False
    found = _MOVES[operation.type](operation, placement)
    if found is None:
        return False
    plan.put(result, found, plan.local(x))
    return True


def _keeps_elements(plan: Planner, operation: Any) -> bool:
    """Plans an operation on tensors of one shape that are all in the same parts, and on numbers."""
    (result,) = operation.outputs
    found: list[Parts] = []
    for x in operation.inputs:
        placement = plan.placement(x)
        if isinstance(placement, Parts) and x.shape.is_fully_defined() and x.shape == result.shape:
            found.append(placement)
        elif not isinstance(placement, Replicate) or x.shape.rank != 0:
            return False
    first = dataclasses.replace(found[0], is_read=any(each.is_read for each in found))
    if any(dataclasses.replace(each, is_read=first.is_read) != first for each in found):
        return False
    plan.emit(operation, plan.locals(operation), first)
    return True


def _unchanged(operation: Any, parts: Parts) -> Parts:
    return parts


def _padded(operation: Any, parts: Parts) -> Parts | None:
    """Returns the parts of a vector with zeros at its end, if the padding of the parts has a place for them."""
    x, paddings, *value = operation.inputs
    sizes = tf.get_static_value(paddings)
    if x.shape.rank != 1 or sizes is None or sizes[0][0] or any(tf.get_static_value(each) != 0 for each in value):
        return None
    return parts if operation.outputs[0].shape[0] <= parts.replicas * parts.width else None


def _sliced(operation: Any, parts: Parts) -> Parts | None:
    """Returns the parts of the first elements of a vector."""
    x, begin, _, strides = operation.inputs
    (result,) = operation.outputs
    others = any(operation.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    from_first = bool(operation.get_attr("begin_mask")) or _is(begin, 0)
    if x.shape.rank != 1 or others or not from_first or not _is(strides, 1):
        return None
    return dataclasses.replace(parts, elements=min(parts.elements, result.shape[0]))


def _is(vector: Any, number: int) -> bool:
    known = tf.get_static_value(vector)
    return known is not None and known.tolist() == [number]


_MOVES: dict[str, Callable[[Any, Parts], Parts | None]] = {
    **dict.fromkeys(("Identity", "PreventGradient", "Reshape", "Snapshot", "StopGradient"), _unchanged),
    "Pad": _padded,
    "PadV2": _padded,
    "StridedSlice": _sliced,
}
