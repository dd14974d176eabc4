"""By which power of the number of rows the tensors of a step grow: a sum over rows by 1, a mean by 0, a count by 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.synchronous.origins import is_of_ragged_rows
from tfrep_strategy.keras_integration.synchronous.row_axes import MATRIX_PRODUCTS, RowAxes, reduced_axes

_ADDITIONS = {"Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub"}
_PRODUCTS = {"Mul": 1, "MulNoNan": 1, "Div": -1, "DivNoNan": -1, "RealDiv": -1}
"""Products and quotients, with the power of the second factor."""

_SMALL = 1e-3
CHECKED = {"CheckNumerics", "CheckNumericsV2", "EnsureShape", "PreventGradient", "Print"}
"""Operations that look at a tensor and pass it on."""

_AS_FIRST_INPUT = CHECKED | {
    "Abs", "BroadcastTo", "Cast", "ExpandDims", "GatherV2", "Identity", "Max", "Mean", "Min", "Neg", "Reshape", "Slice", "Squeeze",
    "StopGradient", "StridedSlice", "TensorListFromTensor", "TensorListGetItem", "TensorListStack", "Tile", "Transpose", "Unpack",
}  # fmt: skip
_AS_ALL_INPUTS = _ADDITIONS | {"Maximum", "Minimum", "SelectV2"}
_MAY_ADD_UP = {"Einsum", "L2Loss", "Size", "Sum", "UnsortedSegmentSum"}
_LINEAR = _AS_FIRST_INPUT - {"Abs", "Max", "Min"} | {"Sum"}

_OF_WEIGHTS = {"BiasAddGrad": (0,)} | dict.fromkeys(
    ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"), (0, 2)
)
"""Gradients by weights, which are sums over rows, and which inputs have these."""

_TOGETHER = {"All": "min", "Any": "max", "Max": "max", "Mean": "mean", "Min": "min", "Sum": "sum"}
REDUCED = ("sum", "mean", "max", "min")
"""How rows are put together, besides that they are counted."""


class _Shape(NamedTuple):
    """Stands for the power of a tensor that is the shape of another one, which has its rows in a dimension."""

    axis: int


class RowPowers:
    """The powers of a graph's tensors, by name; None where nobody knows.

    Args:
        axes: In which dimension tensors have rows.

    Attributes:
        told: By the names of tensors: what the graph need not tell.
    """

    def __init__(self, axes: RowAxes) -> None:
        self.told: dict[str, int] = {}
        self._axes = axes
        self._found: dict[str, Any] = {}
        self._together: dict[str, str] = {}
        self._nothing: set[str] = set()

    def __getitem__(self, tensor: tf.Tensor) -> Any:
        return self.told.get(tensor.name, self._found.get(tensor.name, 0))

    def __setitem__(self, tensor: tf.Tensor, power: Any) -> None:
        self._found[tensor.name] = power

    def note_together(self, tensor: tf.Tensor, kind: str) -> None:
        """Notes that a tensor is a "sum" or a "mean" over rows, whatever computed it."""
        self._together[tensor.name] = kind
        self[tensor] = int(kind == "sum")

    def note_nothing(self, tensor: tf.Tensor, is_nothing: bool) -> None:
        """Notes whether a tensor, which another graph has computed, is zero or next to it."""
        (self._nothing.add if is_nothing else self._nothing.discard)(tensor.name)

    def is_nothing(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a constant such as zero, or that by which nobody divides by zero."""
        constant = tf.get_static_value(tensor)
        return tensor.name in self._nothing or constant is not None and bool(np.all(np.abs(constant) <= _SMALL))

    def follow(self, operation: Any) -> None:
        """Notes the powers of what the next operation of the graph computes."""
        power = self._of(operation)
        if power != 0:
            self._found.update((output.name, power) for output in operation.outputs)

    def is_count(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a number of rows, a sum over them, or a shape with such a number in it."""
        return self[tensor] == 1 or isinstance(self[tensor], _Shape)

    def is_of_shape(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor was computed from the shape of a tensor with rows."""
        return any(isinstance(self[each], _Shape) for each in tensor.op.inputs)

    def reduction(self, tensor: tf.Tensor) -> str | None:
        """Returns what a tensor is: a "sum", "mean", "max" or "min" over rows, or a "count" of them; else None."""
        if (tensor.op.type == "Size" or self.is_of_shape(tensor)) and self[tensor] == 1:
            is_one_more = any(map(self._is_number_of_ragged_rows, tensor.consumers()))
            return None if is_one_more else "count"
        if self._is_number_of_ragged_rows(tensor.op):
            return "count"
        together, power = self.together(tensor), self[tensor]
        if together in ("sum", "mean"):  # A sum of rows that were divided by their number is a mean.
            return "sum" if power == 1 else "mean" if power == 0 and tensor.dtype.is_floating else None
        return together

    def together(self, tensor: tf.Tensor) -> str | None:
        """Returns how an operation puts rows together, whatever these are: as one of `REDUCED`, or not at all."""
        if tensor.name in self._together:
            return self._together[tensor.name]
        operation, kind = tensor.op, tensor.op.type
        axis = self._axes[operation.inputs[0]] if operation.inputs else None
        if kind in _TOGETHER:
            return _TOGETHER[kind] if axis is not None and self._removes_rows(operation) else None
        adds_up = (
            kind == "L2Loss" and axis is not None
            or kind in _OF_WEIGHTS and axis is not None
            or kind in MATRIX_PRODUCTS and self._axes.are_contracted(operation)
            or kind == "Einsum" and self._contracted(operation) == 1
            or kind == "UnsortedSegmentSum" and axis == 0 and self[operation.inputs[2]] == 0  # Not for each row, as ragged ones.
        )  # fmt: skip
        return "sum" if adds_up else None

    def _is_number_of_ragged_rows(self, operation: Any) -> bool:
        """Whether an operation computes `nrows()`: one less than there are places where rows begin and end."""
        if operation.type != "Sub" or tf.get_static_value(operation.inputs[1]) != 1:
            return False
        return self.is_of_shape(operation.inputs[0]) and is_of_ragged_rows(operation)

    def _removes_rows(self, reduction: Any) -> bool:
        """Whether a reduction of a tensor with rows has none. Backward undoes broadcasts along axes that only the run knows."""
        if tf.get_static_value(reduction.inputs[1]) is None:
            return self._axes[reduction.outputs[0]] is None
        return self._axes[reduction.inputs[0]] in reduced_axes(reduction)

    def _of(self, operation: Any) -> Any:
        kind, inputs = operation.type, list(operation.inputs)
        powers = [self[tensor] for tensor in inputs]
        axis = self._axes[inputs[0]] if inputs else None
        if kind == "Shape":
            return 0 if axis is None else _Shape(axis)
        if kind in MATRIX_PRODUCTS:
            return _plus(_plus(*powers), int(self._axes.are_contracted(operation)))
        if kind in _OF_WEIGHTS:
            return functools.reduce(_plus, [powers[i] for i in _OF_WEIGHTS[kind]], int(axis is not None))
        if not any(power != 0 for power in powers) and kind not in _MAY_ADD_UP:
            return 0
        if kind == "Size":
            return int(axis is not None)
        if kind in ("Sum", "L2Loss"):
            return _plus(powers[0], int(axis is not None and (kind == "L2Loss" or self._removes_rows(operation))))
        if kind == "UnsortedSegmentSum":
            return _plus(powers[0], int(axis == 0 and powers[2] == 0))
        if kind == "Einsum":
            return self._contracted(operation) if set(powers) == {0} else None
        if kind == "Prod":
            return 1 if isinstance(powers[0], _Shape) else self._of_product_of(inputs[0])
        if isinstance(powers[0], _Shape) and kind == "StridedSlice":
            begin, rank = tf.get_static_value(inputs[1]), inputs[0].shape[0]
            is_count = begin is not None and rank is not None and begin.tolist() in ([powers[0].axis], [powers[0].axis - rank])
            return (1 if is_count else 0) if operation.get_attr("shrink_axis_mask") else powers[0]
        if isinstance(powers[0], _Shape) and kind == "GatherV2" and (chosen := tf.get_static_value(inputs[1])) is not None:
            places = np.flatnonzero(chosen % inputs[0].shape[0] == powers[0].axis)
            return _Shape(places[0]) if chosen.ndim and len(places) else len(places)
        if kind == "TensorListSetItem":
            return powers[2]
        if kind in _AS_FIRST_INPUT:
            return powers[0]
        if kind in _PRODUCTS or kind == "FloorDiv" and powers[1] == 1:  # All elements by rows: how many a row has.
            return _plus(powers[0], powers[1], _PRODUCTS.get(kind, -1))
        if kind in _AS_ALL_INPUTS:
            bounds = kind in ("ConcatV2", "Maximum", "Minimum", "SelectV2")
            counted = {p for p, t in zip(powers, inputs, strict=True) if not self._is_negligible(t, bounds)}
            return counted.pop() if len(counted) == 1 else None
        # Sizes of what an operation makes say nothing of its values.
        is_size = [t.dtype.is_integer and not operation.outputs[0].dtype.is_integer for t in inputs] if operation.outputs else []
        return None if any(p != 0 and not size for p, size in zip(powers, is_size, strict=False)) else 0

    def _is_negligible(self, tensor: tf.Tensor, bounds: bool) -> bool:
        """Whether it is a condition, a bound, or next to nothing."""
        return tensor.dtype == tf.bool or bounds and tensor.op.type == "Const" or self.is_nothing(tensor)

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


def degree(kind: str, degrees: Sequence[Any]) -> float:
    """Returns how many sums and means over rows are multiplied with each other in what an operation computes.

    Args:
        kind: The type of the operation.
        degrees: Those of its inputs: 0 for what comes from no rows, 1 for a sum or a mean.

    Returns:
        Infinity if the result is no polynomial of these.
    """
    first, *others = degrees
    if not any(degrees):  # It is made of counts. What they come to is told by the power.
        return 0
    if kind in MATRIX_PRODUCTS or kind == "Einsum" or _PRODUCTS.get(kind) == 1:
        return float(sum(degrees))
    if kind in _PRODUCTS and others[0] == 0 or kind in _LINEAR and not any(others):
        return float(first)
    if kind in _ADDITIONS or kind == "SelectV2" and first == 0:
        return float(max(degrees))
    return math.inf


def _plus(one: Any, other: Any, sign: int = 1) -> Any:
    return one + sign * other if isinstance(one, int) and isinstance(other, int) else None
