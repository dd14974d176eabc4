"""How the tensors of a step grow with the number of rows, as its graph tells.

Going through the graph once, we note by which power of the number of rows each tensor grows: a sum by 1, a mean by 0, a count by 1,
and a quotient by the difference. Where the number of rows is fixed, a count is a number like any other. A step that asks is then
traced again, for any number (`open_rows.py`).
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.compared_rows import ComparedRows
from tfrep_strategy.keras_integration.synchronous.mixing_operations import is_of_ragged_rows
from tfrep_strategy.keras_integration.synchronous.open_rows import RowsAreFixedError
from tfrep_strategy.keras_integration.synchronous.row_axes import MATRIX_PRODUCTS, REDUCTIONS, RowAxes, reduced_axes

ADDITIONS = {"Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub"}
PRODUCTS = {"Mul": 1, "MulNoNan": 1, "Div": -1, "DivNoNan": -1, "RealDiv": -1}
"""Products and quotients, with the power of the second factor."""

_SMALL = 1e-3
CHECKED = {"CheckNumerics", "CheckNumericsV2", "EnsureShape", "PreventGradient", "Print"}
"""Operations that look at a tensor and pass it on."""

AS_FIRST_INPUT = CHECKED | {
    "Abs", "BroadcastTo", "Cast", "ExpandDims", "GatherV2", "Identity", "Max", "Mean", "Min", "Neg", "Reshape", "Slice", "Squeeze",
    "StopGradient", "StridedSlice", "Tile", "Transpose", "Unpack",
}  # fmt: skip
_DRAWS = {"Multinomial", "ParameterizedTruncatedNormal", "StatelessMultinomial", "TruncatedNormal"}
"""Operations that draw random numbers, besides those that have "Random" in their names."""

_DATA = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}
SOURCES = _DATA | {"Placeholder"}
"""Operations from which a step gets what it did not compute."""

_AS_ALL_INPUTS = ADDITIONS | {"Maximum", "Minimum", "SelectV2"}
_MAY_ADD_UP = {"Einsum", "L2Loss", "Size", "Sum", "UnsortedSegmentSum"}
_REPEATABLE = REDUCTIONS | CHECKED | {
    "Abs", "Add", "AddV2", "Cast", "Div", "DivNoNan", "Elu", "Equal", "Erf", "Exp", "ExpandDims", "Expm1", "Greater",
    "GreaterEqual", "Identity", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum",
    "Mul", "MulNoNan", "Neg", "NotEqual", "Pow", "RealDiv", "Relu", "Relu6", "Reshape", "Rsqrt", "SelectV2", "Selu", "Sigmoid",
    "Sign", "Softplus", "Sqrt", "Square", "SquaredDifference", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Tanh",
    "Transpose",
}  # fmt: skip
"""Operations that do the same to each row."""

VALUES_OF = {"Fill": slice(1, 2), "Range": slice(0)} | dict.fromkeys(
    ("Bincount", "BroadcastTo", "DenseBincount", "OneHot", "Reshape", "Slice", "StridedSlice", "Tile"), slice(1)
)
"""Of operations with inputs that are sizes, such as the length of the longest sentence: the others."""

_TOGETHER = {"All": "min", "Any": "max", "Max": "max", "Mean": "mean", "Min": "min", "Sum": "sum"}
REDUCED = ("sum", "mean", "max", "min")
"""How rows are put together, besides that they are counted."""

_graphs: weakref.WeakKeyDictionary[Any, RowGrowth] = weakref.WeakKeyDictionary()


def growth_of(step: Step, value: tf.Tensor) -> RowGrowth:
    """Returns what is known of a graph, up to its last operation.

    Raises:
        RowsAreFixedError: The graph has a fixed number of rows.
    """
    if step.rows_are_fixed:
        raise RowsAreFixedError
    return _followed(step, value.graph)


def _followed(step: Step, graph: Any) -> RowGrowth:
    grows = _graphs.setdefault(graph, RowGrowth())
    grows.told[step.share.value.name] = 1
    grows.follow(graph)
    return grows


def note_global(value: Any, own: Any = None) -> tf.Tensor:
    """Notes that a tensor was computed from the rows of all replicas, and is the same on each.

    Args:
        value: The tensor.
        own: What this replica brought, if a step or a layer reduced what each brought. One device has this, of all rows.
    """
    if tf.is_symbolic_tensor(value):
        grows = _graphs.setdefault(value.graph, RowGrowth())
        grows.told[value.name] = 0
        grows.brought.pop(value.name, None)
        if tf.is_symbolic_tensor(own) and own.graph is value.graph:
            grows.brought[value.name] = own.name
    return value


def note_rows(value: tf.Tensor) -> tf.Tensor:
    """Notes that a tensor has something for each row, which depends on no other one, whatever it was computed by."""
    noted = tf.identity(value)
    _graphs.setdefault(noted.graph, RowGrowth()).told_rows.add(noted.name)
    return noted


def note_normalized(value: Any) -> None:
    """Notes rows that one of Keras's layers has normalized with those of the replica alone."""
    if tf.is_symbolic_tensor(value):
        _graphs.setdefault(value.graph, RowGrowth()).of_layers.add(value.name)


def depends_on_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from the replica's rows, and not only from what all replicas have alike.

    Where nobody can tell, in an eager step or a branch, it was.
    """
    return not step.has_computed(value) or _followed(step, value.graph).depends_on_rows(value)


def has_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor has a dimension for the rows of the batch, as far as the graph tells."""
    grows = _followed(step, value.graph)
    return grows.axis(value) is not None or bool(value.shape.rank) and grows.is_of_rows(value)


def is_drawn(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from random numbers, of which each replica draws its own."""
    grows, left, seen = _followed(step, value.graph), [value], set()
    while left:
        tensor = left.pop()
        if tensor.name in seen or grows.told.get(tensor.name) == 0:
            continue
        seen.add(tensor.name)
        if "Random" in tensor.op.type or tensor.op.type in _DRAWS:
            return True
        left += tensor.op.inputs
    return False


class _Shape(NamedTuple):
    """Stands for the power of a tensor that is the shape of another one, which has its rows in a dimension."""

    axis: int


class RowGrowth:
    """By which power of the number of rows the tensors of a graph grow; None where nobody knows.

    Tensors are known by their names: one of them would keep the graph from being freed, and the graph keeps this.
    """

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        """By the names of tensors: what the graph need not tell."""
        self.brought: dict[str, str] = {}
        """By the names of tensors that replicas have reduced: the name of what this replica brought."""
        self.told_rows: set[str] = set()
        """The names of tensors of which the graph need not tell that they are rows."""
        self.of_layers: set[str] = set()
        """The names of tensors with rows that layers have normalized, and of what was made of these and row by row."""
        self._found: dict[str, Any] = {}
        self._axes = RowAxes()
        self.compared = ComparedRows(self._axes)
        self._dependent: set[str] = set()
        """The names of tensors that come from rows, or from their number."""
        self._reduced: set[str] = set()
        """The names of tensors without rows that come from rows, and not only from their number."""
        self._normalized: set[str] = set()
        """The names of tensors with rows that were computed from such and from rows, without weights, and row by row."""
        self._mixed: set[str] = set()
        """The names of tensors that were computed from rows that depend on others, so that a replica has others than one device."""
        self._rows: dict[str, int] = {}
        """How many rows the data has from which a tensor comes, by its name, where all batches have one size."""
        self._followed = 0

    def __getitem__(self, tensor: tf.Tensor) -> Any:
        return self.told.get(tensor.name, self._found.get(tensor.name, 0))

    def is_of_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor has as many rows as the data from which it comes, where all batches have one size."""
        return tensor.shape[0] is not None and tensor.shape[0] == self._rows.get(tensor.name) and tensor.op.type != "Pack"

    def depends_on_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor was computed from the replica's rows; see `depends_on_rows`."""
        return tensor.name in self._dependent and self.told.get(tensor.name) != 0

    def brought_mixed(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what this replica brought to a sum of all, if it comes from mixed rows: on one device the sum is just that."""
        own = self.brought.get(tensor.name) if tensor.name in self._mixed else None
        return None if own is None else tensor.graph.get_tensor_by_name(own)

    def axis(self, tensor: tf.Tensor) -> int | None:
        """Returns in which dimension a tensor has rows; None if it has none."""
        return self._axes[tensor]

    def is_normalized(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor has rows, to which something was done with what comes from all of them: `x - ops.mean(x, 0)`."""
        return tensor.name in self._normalized

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

    def _is_number_of_ragged_rows(self, operation: Any) -> bool:
        """Whether an operation computes `nrows()`: one less than there are places where rows begin and end."""
        if operation.type != "Sub" or tf.get_static_value(operation.inputs[1]) != 1:
            return False
        return self.is_of_shape(operation.inputs[0]) and is_of_ragged_rows(operation)

    def together(self, tensor: tf.Tensor) -> str | None:
        """Returns how an operation puts rows together, whatever these are: as one of `REDUCED`, or not at all."""
        operation, kind = tensor.op, tensor.op.type
        axis = self._axes[operation.inputs[0]] if operation.inputs else None
        if kind in _TOGETHER:
            return _TOGETHER[kind] if axis is not None and self._removes_rows(operation) else None
        adds_up = (
            kind == "L2Loss" and axis is not None
            or kind in MATRIX_PRODUCTS and self._axes.are_contracted(operation)
            or kind == "Einsum" and self._contracted(operation) == 1
            or kind == "UnsortedSegmentSum" and axis == 0 and self[operation.inputs[2]] == 0  # Not for each row, as ragged ones.
        )  # fmt: skip
        return "sum" if adds_up else None

    def _removes_rows(self, reduction: Any) -> bool:
        """Whether a reduction of a tensor with rows has none. Backward undoes broadcasts along axes that only the run knows."""
        if tf.get_static_value(reduction.inputs[1]) is None:
            return self._axes[reduction.outputs[0]] is None
        return self._axes[reduction.inputs[0]] in reduced_axes(reduction)

    def follow(self, graph: Any) -> None:
        """Goes through the operations that were added to the graph since the last call."""
        operations = graph.get_operations()
        captured = {tensor.name for tensor in getattr(graph, "internal_captures", ())}
        for operation in operations[self._followed :]:
            is_data = operation.type in _DATA or operation.type == "Placeholder" and operation.outputs[0].name not in captured
            if operation.outputs and operation.outputs[0].name in self.told_rows:
                self._dependent.add(operation.outputs[0].name)
                self._axes.note(operation.outputs[0])
                self.compared.follow(operation, True, [], [])
                continue
            if is_data or any(map(self.depends_on_rows, operation.inputs)):
                self._dependent.update(output.name for output in operation.outputs)
            else:
                self._dependent.update(output.name for output in operation.outputs if self.told.get(output.name) == 1)
            self._follow_rows(operation, is_data)
            counts = self._counts(operation)
            inputs = [each for each in operation.inputs if self.told.get(each.name) != 0]
            self._axes.follow(operation, is_data, inputs, list(filter(self._is_count, counts)))
            self.compared.follow(operation, is_data, inputs, counts)
            power = self._of(operation)
            if power != 0:
                self._found.update((output.name, power) for output in operation.outputs)
            self._follow_reduced(operation)
            self._follow_mixed(operation)
        self._followed = len(operations)

    def _counts(self, operation: Any) -> list[tf.Tensor]:
        """Returns what an operation gets that comes from the number of rows, such as a dimension of a shape."""
        parts = [part for each in operation.inputs for part in (each.op.inputs if each.op.type == "Pack" else [each])]
        sure = operation.type in ("Fill", "Range")  # Other sizes are not known to be numbers of rows.
        return [part for part in parts if part.dtype.is_integer and (self._is_count(part) if sure else self[part] != 0)]

    def _is_count(self, tensor: tf.Tensor) -> bool:
        return self[tensor] == 1 or isinstance(self[tensor], _Shape)

    def _follow_reduced(self, operation: Any) -> None:
        inputs = [each.name for each in operation.inputs[VALUES_OF.get(operation.type, slice(None))]]
        inputs = [name for name in inputs if self.told.get(name) != 0]
        for output in operation.outputs:
            if self._axes[output] is None:
                if any(name in self._reduced for name in inputs) or self.together(output) is not None:
                    self._reduced.add(output.name)
            elif output not in self.compared and any(name in self._reduced or name in self._normalized for name in inputs):
                self._follow_shared(operation, output)

    def _follow_shared(self, operation: Any, output: tf.Tensor) -> None:
        """Notes what becomes of rows to which something was done with what comes from all of them."""
        is_row_by_row = operation.type in _REPEATABLE and all(map(self._is_free_of_weights, operation.inputs))
        shared = {each.name for each in operation.inputs if self.told.get(each.name) != 0} & (self._normalized | self._reduced)
        if shared <= self.of_layers:
            if not is_row_by_row:
                return  # To compute a pool, or products with weights, from the rows of all would cost as much as one device's.
            self.of_layers.add(output.name)
        if is_row_by_row:
            self._normalized.add(output.name)
        else:
            self.compared.note(output)

    def _follow_mixed(self, operation: Any) -> None:
        is_list = any(output.dtype == tf.variant for output in operation.outputs)  # As a loop reads: its rows have no dimension.
        if is_list and any(each.name in self._normalized and each.name not in self.of_layers for each in operation.inputs):
            for output in operation.outputs:
                self.compared.note(output)
        is_mixed = any(each.name in self._mixed and self.told.get(each.name) != 0 for each in operation.inputs)
        for output in operation.outputs:
            own = self.brought.get(output.name)
            if own in self._mixed:
                self._go_on_from(output.graph.get_tensor_by_name(own), output)
            if output in self.compared or (is_mixed or output.name in self._normalized) and output.name not in self.of_layers:
                self._mixed.add(output.name)

    def _go_on_from(self, own: tf.Tensor, reduced: tf.Tensor) -> None:
        """Notes that what the replicas have reduced is not yet what one device has, unless it has rows."""
        if self._axes[own] is not None:
            return
        del self.told[reduced.name]
        self._found[reduced.name] = self[own]
        self._dependent.add(reduced.name)
        self._reduced.add(reduced.name)
        self._mixed.add(reduced.name)
        if own in self.compared:
            self.compared.note(reduced)

    def _is_free_of_weights(self, tensor: tf.Tensor) -> bool:
        has_rows = self._axes[tensor] is not None
        return has_rows or tensor.name in self._dependent or tf.get_static_value(tensor) is not None

    def _follow_rows(self, operation: Any, is_data: bool) -> None:
        if operation.type in REDUCTIONS and 0 in reduced_axes(operation):
            return
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
        if kind in AS_FIRST_INPUT:
            return powers[0]
        if kind in PRODUCTS or kind == "FloorDiv" and powers[1] == 1:  # All elements by rows: how many a row has.
            return _plus(powers[0], powers[1], PRODUCTS.get(kind, -1))
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
