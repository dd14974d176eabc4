"""Scalars that are sums over the rows of a batch, such as `ops.sum(errors)` in a step or a layer of the user's own.

A replica's value of a mean over rows counts with its share; its value of a sum counts whole. The graph of the step tells which of
the two a scalar is. Going through it once, we note by which power of the number of rows each tensor grows: a sum by 1, a mean by 0,
a count by 1, and a quotient by the difference. What the graph does not tell is taken for a mean, and so is all of an eager step.

Where the number of rows is fixed, a count is a number like any other. A step that asks is then traced again, for any number
(`open_rows.py`). One that cannot be traced so takes all scalars for means. There, and in an eager step, a tensor has a number for
each row if it is as long as the replica's part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.open_rows import RowsAreFixedError
from tfrep_strategy.keras_integration.synchronous.row_axes import MATRIX_PRODUCTS, REDUCTIONS, RowAxes, reduced_axes

_SMALL = 1e-3
_AS_FIRST_INPUT = {
    "Abs", "Cast", "ExpandDims", "GatherV2", "Identity", "Max", "Mean", "Min", "Neg", "Reshape", "Slice", "Squeeze", "StopGradient",
    "StridedSlice", "Transpose", "Unpack",
}  # fmt: skip
_DATA = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}
_AS_ALL_INPUTS = {"Add", "AddN", "AddV2", "ConcatV2", "Maximum", "Minimum", "Pack", "SelectV2", "Sub"}
_MAY_ADD_UP = {"Einsum", "L2Loss", "Size", "Sum", "UnsortedSegmentSum"}
_PRODUCTS = {"Mul": 1, "MulNoNan": 1, "Div": -1, "DivNoNan": -1, "RealDiv": -1}
_graphs: weakref.WeakKeyDictionary[Any, _Growth] = weakref.WeakKeyDictionary()


def part_of_global(step: Step, value: tf.Tensor) -> tf.Tensor:
    """Returns what this replica adds to a scalar of the global batch: a sum as it is, a mean times the share."""
    sums, means = sums_and_means(step, value)
    return tf.add_n([*sums, *map(step.share.weigh, means)]) if sums else step.share.weigh(value)


def as_mean(step: Step, value: tf.Tensor) -> tf.Tensor:
    """Returns a scalar that the share can weigh, whatever the given one is."""
    sums, _ = sums_and_means(step, value)
    return step.share.unweigh(part_of_global(step, value)) if sums else value


def sums_and_means(step: Step, value: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Takes a scalar apart into addends that are sums over rows, and others."""
    told = step.gathers or step.is_noted_mean(value)
    if told or not tf.is_symbolic_tensor(value) or value.shape.rank != 0 or not value.dtype.is_floating:
        return [], [value]
    grows = _growth_of(step, value)
    left, sums, means = [value], [], []
    while left:
        tensor = left.pop()
        if grows[tensor] == 1:
            sums.append(tensor)
        elif grows[tensor] is None and tensor.op.type in ("Add", "AddV2", "AddN"):
            left += tensor.op.inputs
        else:
            means.append(tensor)
    return sums, means


def can_follow(step: Step, value: tf.Tensor) -> bool:
    """Returns whether the graph tells what becomes of a scalar, so that a sum over rows may stay the replica's own.

    A step that is traced for one number of rows does not: its losses are Keras's, of which nobody makes anything else.
    """
    return step.has_computed(value) and not step.gathers and not step.rows_are_fixed


def depends_on_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from the replica's rows, and not only from what all replicas have alike.

    Where nobody can tell, in an eager step or a branch, it was.
    """
    if not step.has_computed(value):
        return True
    told = _graphs[value.graph].told if value.graph in _graphs else {}
    captured = {tensor.name for tensor in value.graph.internal_captures}
    seen, waiting = set(), [value]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.name in captured or told.get(tensor.name) == 0:
            continue
        seen.add(tensor.name)
        if tensor.op.type in _DATA or tensor.op.type == "Placeholder":
            return True
        waiting += tensor.op.inputs
    return False


def reduced_rows(step: Step, value: tf.Tensor) -> dict[str, list[tf.Tensor]] | None:
    """Finds what a tensor has of the replica's rows.

    Args:
        step: What the replica knows of the step.
        value: A tensor of the step's graph.

    Returns:
        The tensors from which it was computed: those in which rows were put together, as a "sum", a "mean", the "max" or the
        "min", and those that are "alike" on all replicas. None if rows reach it in another way.
    """
    return _growth_of(step, value).reduced_rows(value, lambda tensor: depends_on_rows(step, tensor))


def is_count(step: Step, value: tf.Tensor) -> bool:
    """Returns whether an integer scalar is a count of rows, or a sum over them."""
    if step.gathers or not tf.is_symbolic_tensor(value) or value.shape.rank != 0:
        return False
    return bool(_growth_of(step, value)[value] == 1)


def are_rows(step: Step, target: Any) -> bool:
    """Returns whether a tensor has a number for each row, such as a loss without a reduction. A tape adds them up."""
    if step.gathers or not isinstance(target, tf.Tensor) or not target.shape.rank:
        return False
    if not tf.is_symbolic_tensor(target):
        return bool(target.shape[0] == step.rows)
    total = tf.reduce_sum(target)
    grows = _growth_of(step, total)
    return bool(grows[total] == 1) or grows.is_of_rows(target)


def _growth_of(step: Step, value: tf.Tensor) -> _Growth:
    if step.rows_are_fixed:
        raise RowsAreFixedError
    grows = _graphs.setdefault(value.graph, _Growth())
    grows.told[step.share.value.name] = 1
    grows.follow(value.graph)
    return grows


def note_global(value: Any) -> tf.Tensor:
    """Notes that a tensor was computed from the rows of all replicas, and is the same on each."""
    if tf.is_symbolic_tensor(value):
        _graphs.setdefault(value.graph, _Growth()).told[value.name] = 0
    return value


class _Shape(NamedTuple):
    """Stands for the power of a tensor that is the shape of another one, which has its rows in a dimension."""

    axis: int


class _Growth:
    """By which power of the number of rows the tensors of a graph grow; None where nobody knows."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        """By the names of tensors: what the graph need not tell."""
        self._found: dict[str, Any] = {}
        self._axes = RowAxes()
        self._rows: dict[str, int] = {}
        """How many rows the data has from which a tensor comes, by its name, where all batches have one size."""
        self._followed = 0

    def __getitem__(self, tensor: tf.Tensor) -> Any:
        return self.told.get(tensor.name, self._found.get(tensor.name, 0))

    def is_of_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor has as many rows as the data from which it comes, where all batches have one size."""
        return tensor.shape[0] is not None and tensor.shape[0] == self._rows.get(tensor.name) and tensor.op.type != "Pack"

    def reduced_rows(self, value: tf.Tensor, depends: Callable[[tf.Tensor], bool]) -> dict[str, list[tf.Tensor]] | None:
        """Walks back from a tensor to those in which rows were put together."""
        found: dict[str, list[tf.Tensor]] = {}
        seen, waiting = set(), [value]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            alike = self._is_size_of_all(tensor) or not depends(tensor)
            kind = "alike" if alike else self._reduction_of_rows(tensor)
            if kind is not None:
                found.setdefault(kind, []).append(tensor)
            elif self._axes[tensor] is not None or tensor.op.type in _DATA | {"Placeholder"} or tensor.op.op_def.is_stateful:
                return None
            else:
                waiting += tensor.op.inputs
        return found

    def _is_size_of_all(self, tensor: tf.Tensor) -> bool:
        """Whether it is a size of the data that has nothing to do with the number of rows."""
        return any(isinstance(self[each], _Shape) for each in tensor.op.inputs) and self[tensor] == 0

    def _reduction_of_rows(self, tensor: tf.Tensor) -> str | None:
        operation, kind = tensor.op, tensor.op.type
        axis = self._axes[operation.inputs[0]] if operation.inputs else None
        if kind in ("Max", "Min") and axis is not None and axis in reduced_axes(operation):
            return kind.lower()
        counts = any(isinstance(self[each], _Shape) for each in operation.inputs) or kind == "Size"
        adds_up = (
            kind in ("Mean", "Sum", "L2Loss") and axis is not None and (kind == "L2Loss" or axis in reduced_axes(operation))
            or kind in MATRIX_PRODUCTS and self._axes.are_contracted(operation)
            or kind == "Einsum" and self._contracted(operation) == 1
            or kind == "UnsortedSegmentSum" and axis == 0
        )  # fmt: skip
        if counts or adds_up:
            return "sum" if self[tensor] == 1 else "mean" if adds_up and tensor.dtype.is_floating else None
        return None

    def follow(self, graph: Any) -> None:
        """Goes through the operations that were added to the graph since the last call."""
        operations = graph.get_operations()
        captured = {tensor.name for tensor in getattr(graph, "internal_captures", ())}
        for operation in operations[self._followed :]:
            self._follow_rows(operation, captured)
            self._axes.follow(operation)
            power = self._of(operation)
            if power != 0:
                self._found.update((output.name, power) for output in operation.outputs)
        self._followed = len(operations)

    def _follow_rows(self, operation: Any, captured: Set[str]) -> None:
        if operation.type in REDUCTIONS and 0 in reduced_axes(operation):
            return
        is_data = operation.type in _DATA or operation.type == "Placeholder" and operation.outputs[0].name not in captured
        known = [self._rows[tensor.name] for tensor in operation.inputs if tensor.name in self._rows]
        for output in operation.outputs:
            if known or is_data and output.shape.rank and output.shape[0]:
                self._rows[output.name] = known[0] if known else output.shape[0]

    def _of(self, operation: Any) -> Any:
        kind, inputs = operation.type, list(operation.inputs)
        powers = [self[tensor] for tensor in inputs]
        axis = self._axes[inputs[0]] if inputs else None
        if kind == "Shape":
            return 0 if axis is None else _Shape(axis)
        if kind in MATRIX_PRODUCTS:
            return _plus(_plus(*powers), int(self._axes.are_contracted(operation)))
        if not any(power != 0 for power in powers) and kind not in _MAY_ADD_UP:
            return 0
        if kind == "Size":
            return int(axis is not None)
        if kind in ("Sum", "L2Loss"):
            return _plus(powers[0], int(axis is not None and (kind == "L2Loss" or axis in reduced_axes(operation))))
        if kind == "UnsortedSegmentSum":
            return _plus(powers[0], int(axis == 0))
        if kind == "Einsum":
            return self._contracted(operation) if set(powers) == {0} else None
        if kind == "Prod":
            return 1 if isinstance(powers[0], _Shape) else self._of_product_of(inputs[0])
        if isinstance(powers[0], _Shape) and kind == "StridedSlice":
            is_count = np.array_equal(tf.get_static_value(inputs[1]), [powers[0].axis])
            return (1 if is_count else 0) if operation.get_attr("shrink_axis_mask") else powers[0]
        if kind in _AS_FIRST_INPUT:
            return powers[0]
        if kind in _PRODUCTS:
            return _plus(powers[0], powers[1], _PRODUCTS[kind])
        if kind in _AS_ALL_INPUTS:
            bounds = kind in ("ConcatV2", "Maximum", "Minimum", "SelectV2")
            counted = {p for p, t in zip(powers, inputs, strict=True) if not _is_negligible(t, bounds)}
            return counted.pop() if len(counted) == 1 else None
        # Sizes of what an operation makes say nothing of its values.
        is_size = [t.dtype.is_integer and not operation.outputs[0].dtype.is_integer for t in inputs] if operation.outputs else []
        return None if any(p != 0 and not size for p, size in zip(powers, is_size, strict=False)) else 0

    def _contracted(self, operation: Any) -> Any:
        """Returns 1 if `Einsum` adds up the rows, 0 if it does not."""
        given, _, result = operation.get_attr("equation").decode().partition("->")
        terms = [(term, self._axes[tensor]) for term, tensor in zip(given.split(","), operation.inputs, strict=True)]
        rows = {term[axis] for term, axis in terms if axis is not None and "." not in term}
        return None if "." in given else int(bool(rows - set(result)))

    def _of_product_of(self, tensor: tf.Tensor) -> Any:
        while tensor.op.type in ("Cast", "Identity"):
            tensor = tensor.op.inputs[0]
        if tensor.op.type != "Pack":
            return None
        return sum(powers) if None not in (powers := [self[t] for t in tensor.op.inputs]) else None


def _plus(one: Any, other: Any, sign: int = 1) -> Any:
    return one + sign * other if isinstance(one, int) and isinstance(other, int) else None


def _is_negligible(tensor: tf.Tensor, bounds: bool) -> bool:
    """Whether it is a condition, a bound, or a constant such as that by which nobody divides by zero."""
    if tensor.dtype == tf.bool or bounds and tensor.op.type == "Const":
        return True
    constant = tf.get_static_value(tensor)
    return constant is not None and bool(np.all(np.abs(constant) <= _SMALL))
