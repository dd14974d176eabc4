"""How the tensors of a step grow with the number of rows, as its graph tells.

Going through the graph once, we note by which power of the number of rows each tensor grows: a sum by 1, a mean by 0, a count by 1,
and a quotient by the difference. Where the number of rows is fixed, a count is a number like any other. A step that asks is then
traced again, for any number (`open_rows.py`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.called_rows import (
    BRANCHES,
    MIXED,
    OF_PYTHON,
    Known,
    Result,
    calls_of,
    results_of,
)
from tfrep_strategy.keras_integration.synchronous.compared_rows import ComparedRows
from tfrep_strategy.keras_integration.synchronous.mixing_operations import mixes_rows_by_itself
from tfrep_strategy.keras_integration.synchronous.open_rows import RowsAreFixedError
from tfrep_strategy.keras_integration.synchronous.origins import is_of_vectorized_map
from tfrep_strategy.keras_integration.synchronous.row_axes import REDUCTIONS, RowAxes, reduced_axes
from tfrep_strategy.keras_integration.synchronous.row_powers import CHECKED, RowPowers, degree

_DRAWS = {"Multinomial", "ParameterizedTruncatedNormal", "StatelessMultinomial", "TruncatedNormal"}
"""Operations that draw random numbers, besides those that have "Random" in their names."""

_DATA = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}
SOURCES = _DATA | {"Placeholder"}
"""Operations from which a step gets what it did not compute."""

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


def _begun(graph: Any) -> RowGrowth:
    """Returns what was noted while a graph that is called was traced."""
    inner, noted = RowGrowth(), _graphs.get(graph, RowGrowth())
    inner.told.update(noted.told)
    inner.told_rows |= noted.told_rows
    inner.compared.own_seeds |= noted.compared.own_seeds
    inner.of_layers |= noted.of_layers
    return inner


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


def note_own_seed(seed: tf.Tensor) -> tf.Tensor:
    """Notes that each replica draws with another seed than this one."""
    if tf.is_symbolic_tensor(seed):
        _graphs.setdefault(seed.graph, RowGrowth()).compared.own_seeds.add(seed.name)
    return seed


def depends_on_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from the replica's rows, and not only from what all replicas have alike.

    Where nobody can tell, in an eager step or a branch, it was.
    """
    return not step.has_computed(value) or _followed(step, value.graph).depends_on_rows(value)


def has_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor has a dimension for the rows of the batch, as far as the graph tells."""
    grows = _followed(step, value.graph)
    return grows.axis(value) is not None or bool(value.shape.rank) and grows.is_of_rows(value)


def is_drawn(step: Step, value: tf.Tensor, besides_rows: bool = False) -> bool:
    """Returns whether a tensor was computed from random numbers, of which each replica draws its own.

    Args:
        step: The current step.
        value: The tensor.
        besides_rows: Whether numbers do not count that were drawn for each row, or used with rows.
    """
    grows, left, seen = _followed(step, value.graph), [value], set()
    while left:
        tensor = left.pop()
        if tensor.name in seen or grows.told.get(tensor.name) == 0 or besides_rows and grows.axis(tensor) is not None:
            continue
        seen.add(tensor.name)
        if "Random" in tensor.op.type or tensor.op.type in _DRAWS:
            return True
        left += tensor.op.inputs
    return False


class RowGrowth:
    """By which power of the number of rows the tensors of a graph grow; None where nobody knows.

    Tensors are known by their names: one of them would keep the graph from being freed, and the graph keeps this.
    """

    def __init__(self) -> None:
        self._axes = RowAxes()
        self.powers = RowPowers(self._axes)
        self.compared = ComparedRows(self._axes)
        self.brought: dict[str, str] = {}
        """By the names of tensors that replicas have reduced: the name of what this replica brought."""
        self.told_rows: set[str] = set()
        """The names of tensors of which the graph need not tell that they are rows."""
        self.of_layers: set[str] = set()
        """The names of tensors with rows that layers have normalized, and of what was made of these and row by row."""
        self._dependent: set[str] = set()
        """The names of tensors that come from rows, or from their number."""
        self._reduced: set[str] = set()
        """The names of tensors without rows that come from rows, and not only from their number."""
        self._degrees: dict[str, float] = {}
        """How many sums and means over rows are multiplied with each other in such tensors, by name; see `row_powers.degree`."""
        self._normalized: set[str] = set()
        """The names of tensors with rows that were computed from such and from rows, without weights, and row by row."""
        self._mixed: set[str] = set()
        """The names of tensors that were computed from rows that depend on others, so that a replica has others than one device."""
        self._rows: dict[str, int] = {}
        """How many rows the data has from which a tensor comes, by its name, where all batches have one size."""
        self._followed = 0

    def __getitem__(self, tensor: tf.Tensor) -> Any:
        return self.powers[tensor]

    @property
    def told(self) -> dict[str, int]:
        """By the names of tensors: the power that the graph need not tell."""
        return self.powers.told

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

    def mixes(self, operation: Any) -> bool:
        """Returns whether an operation mixes rows by itself: sorts, shifts or compares them, say."""
        return mixes_rows_by_itself(self._axes, operation, [each for each in operation.inputs if self._axes[each] is not None])

    def is_normalized(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor has rows, to which something was done with what comes from all of them: `x - ops.mean(x, 0)`."""
        return tensor.name in self._normalized

    def follow(self, graph: Any, known: Collection[str] = ()) -> None:
        """Goes through the operations that were added to the graph since the last call.

        Args:
            graph: The graph.
            known: The names of those tensors that the graph is given, and that are no data.
        """
        operations = graph.get_operations()
        known = {*known, *(tensor.name for tensor in getattr(graph, "internal_captures", ()))}
        for operation in operations[self._followed :]:
            is_data = operation.type in _DATA or operation.type == "Placeholder" and operation.outputs[0].name not in known
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
            self._axes.follow(operation, is_data, inputs, list(filter(self.powers.is_count, counts)))
            self.compared.follow(operation, is_data, inputs, counts)
            self.powers.follow(operation)
            self._follow_calls(operation)
            self._follow_reduced(operation)
            self._follow_mixed(operation)
        self._followed = len(operations)

    def _counts(self, operation: Any) -> list[tf.Tensor]:
        """Returns what an operation gets that comes from the number of rows, such as a dimension of a shape."""
        parts = [part for each in operation.inputs for part in (each.op.inputs if each.op.type == "Pack" else [each])]
        sure = operation.type in ("Fill", "Range")  # Other sizes are not known to be numbers of rows.
        return [part for part in parts if part.dtype.is_integer and (self.powers.is_count(part) if sure else self[part] != 0)]

    def _follow_calls(self, operation: Any) -> None:
        """Notes what loops, branches and functions make of rows inside."""
        if not any(map(self.depends_on_rows, operation.inputs)):
            return
        if operation.type in OF_PYTHON and any(self._axes[each] is not None for each in operation.inputs):
            for output in operation.outputs:
                if output.shape.rank is None or None not in output.shape:  # What has rows is believed to be row by row.
                    self.compared.note(output)
        if not (calls := calls_of(operation)):
            return
        if operation.type in BRANCHES and self.is_reduced(operation.inputs[0]) or any(map(self._is_mixed, operation.inputs)):
            for output in operation.outputs:
                self.compared.note(output)
            return
        if is_of_vectorized_map(operation):
            return
        found = zip(*(results_of(self, call, _begun) for call in calls), strict=False)
        for output, results in zip(operation.outputs, map(set, found), strict=False):
            self._note_result(output, results)

    def _note_result(self, output: tf.Tensor, results: set[Result]) -> None:
        kinds = {each.kind for each in results if not _is_neutral(each, results)}
        if len(kinds) > 1 or MIXED in kinds:
            self.compared.note(output)
        elif (kind := kinds.pop()) is not None:
            self.powers.note_together(output, kind)
        else:
            known = {(each.known.power, each.known.rows) for each in results}
            self.powers[output], rows = known.pop() if len(known) == 1 else (None, None)
            if self.compared.says_where(output) and not any(each.known.compared.state for each in results):
                self.compared.forget(output)  # By places, something was taken for each row.
            if rows is not None and rows.has_rows and output.dtype == tf.variant:
                self._axes.note(output, rows.moved_to)

    def _is_mixed(self, tensor: tf.Tensor) -> bool:
        is_own = self.told.get(tensor.name) == 0 or self.compared.says_where(tensor)
        return tensor.name in self._mixed and not is_own

    def known(self, tensor: tf.Tensor) -> Known:
        """Returns what is known of a tensor that a loop, a branch or a function gets or computes."""
        return Known(
            depends=self.depends_on_rows(tensor),
            rows=self._axes.known(tensor),
            axis=self._axes[tensor],
            power=self[tensor],
            is_nothing=self.powers.is_nothing(tensor),
            degree=self._degrees.get(tensor.name) if self.is_reduced(tensor) else None,
            compared=self.compared.known(tensor),
            is_mixed=self._is_mixed(tensor),
        )

    def begin_with(self, tensor: tf.Tensor, known: Known) -> None:
        """Notes what is known of a tensor of another graph that is this one here."""
        self.powers.note_nothing(tensor, known.is_nothing)
        self.compared.begin_with(tensor, known.compared)
        if self.told.get(tensor.name) == 0 or not known.depends:
            return
        self._dependent.add(tensor.name)
        if known.rows.has_rows:
            self._axes.note(tensor, known.rows.moved_to)
        self.powers[tensor] = known.power
        if known.degree is not None:
            self._reduced.add(tensor.name)
            self._degrees[tensor.name] = known.degree
        if known.is_mixed:
            self._mixed.add(tensor.name)

    def is_reduced(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor without rows comes from rows, and not only from their number."""
        return tensor.name in self._reduced and self.told.get(tensor.name) != 0

    def _follow_reduced(self, operation: Any) -> None:
        inputs = [each.name for each in operation.inputs[VALUES_OF.get(operation.type, slice(None))]]
        inputs = [name for name in inputs if self.told.get(name) != 0]
        for output in operation.outputs:
            if self._axes[output] is None:
                together = self.powers.together(output)
                if any(name in self._reduced for name in inputs) or together is not None:
                    self._reduced.add(output.name)
                    self._degrees[output.name] = self._degree(operation, together)
            elif output not in self.compared and any(name in self._reduced or name in self._normalized for name in inputs):
                self._follow_shared(operation, output)

    def _degree(self, operation: Any, together: str | None) -> float:
        if together is not None:
            return 1.0 if together in ("sum", "mean") else math.inf
        return degree(operation.type, [self._degrees.get(each.name, 0.0) for each in operation.inputs])

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
        is_mixed = any(map(self._is_mixed, operation.inputs))
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
        self.powers[reduced] = self[own]
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


def _is_neutral(result: Result, results: Collection[Result]) -> bool:
    """Whether a branch gives what counts as another one's does: all replicas' one value as a mean, zero as a sum."""
    kinds = {each.kind for each in results} - {None}
    is_alike = result.kind is None and not result.known.depends
    return is_alike and (kinds == {"mean"} or kinds == {"sum"} and result.known.is_nothing)
