"""Operations after which a row depends on the other rows of the batch, or on its place among them.

They compare rows in pairs (the similarities of a contrastive loss), sort, choose or shift them. What is computed after them follows
from the rows of all replicas only (`row_reductions.py`). Sums, means and the like over rows are not among them: replicas put
these together with less.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.keras_integration.synchronous.mixing_operations import (
    OF_ALL_ELEMENTS,
    PADS,
    RULES,
    axis_of,
    is_along_an_input,
    is_of_lengths,
    joins_parts,
    mixes_rows_by_itself,
)
from tfrep_strategy.keras_integration.synchronous.origins import is_of_ragged_rows
from tfrep_strategy.keras_integration.synchronous.row_axes import OF_SHAPES, RowAxes, reduced_axes

_OF_VECTORS = {"Bincount", "DenseBincount"}
"""Operations that count for each row in matrices, and in vectors that have several elements for a row, at offsets."""

_OF_SEGMENTS = {"UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum"}
_BY_NUMBERS = {"GatherNd", "GatherV2"} | OF_ALL_ELEMENTS | _OF_SEGMENTS
"""Operations that take or put together what numbers say, which are their second input."""

_AT_PLACES = {
    "CropAndResize", "GatherNd", "GatherV2", "RaggedTensorToTensor", "ScatterNd", "TensorScatterAdd", "TensorScatterUpdate",
}  # fmt: skip
"""Operations that take or put something for each row if they are given the places of rows, or the lengths of ragged ones."""

_MOVES = {"FloorMod", "ReverseV2", "Roll", "Slice", "StridedSlice"}
"""Operations that make other places of the places of rows."""

_SETS = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_COUNTING = _SETS | _OF_SEGMENTS | OF_ALL_ELEMENTS | _OF_VECTORS | {"DynamicPartition", "Where"}
_CUTTING = PADS | {"ConcatV2", "GatherV2", "Slice", "Split", "SplitV", "StridedSlice", "Tile", "TopKV2"}
"""Operations after which the number of rows is another one: always, and if they are along the rows."""

_OF_DIAGONALS = {"MatrixBandPart", "MatrixDiag", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixSetDiagV3"}

_READS = {"ReadVariableOp", "VarHandleOp"}
_PLACES, _CHOICE, _OTHERS = "places", "choice", "others"
"""What a tensor was computed from: places of rows among the batch, those of some that were chosen, or other rows."""


class KnownComparison(NamedTuple):
    """What is known of a tensor; see `ComparedRows`."""

    is_from_values: bool
    state: str | None
    is_chosen: bool
    is_counted_anew: bool
    multiple: Fraction | None
    is_own_seed: bool


class ComparedRows:
    """Which tensors of a graph depend on other rows than their own, or on the places of rows in the batch.

    Args:
        axes: In which dimension tensors have rows.
    """

    def __init__(self, axes: RowAxes) -> None:
        self._axes = axes
        self._from_values: set[str] = set()
        """The names of tensors that come from values of rows, and not only from their number."""
        self._found: dict[str, str] = {}
        self._chosen: set[str] = set()
        """The names of tensors with some of the rows of a batch, in their order, and of how many these are."""
        self._multiples: dict[str, Fraction | None] = {}
        """How many rows of tensors are of one row of the batch, if not 1; None where nobody knows."""
        self._counted_anew: set[str] = set()
        """The names of tensors with as many rows as values or places decide, so that replicas' numbers of rows do not add up."""
        self._joined: dict[str, list[tuple[str, int]]] = {}
        self._by_numbers: set[str] = set()
        self.own_seeds: set[str] = set()
        """The names of seeds that each replica has for itself."""
        self._given: set[str] = set()
        """The names of tensors that were computed in another graph, of which all is known that is known there."""

    def __contains__(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._found

    def joined(self, tensor: tf.Tensor) -> list[tuple[tf.Tensor, int]]:
        """Returns the tensors whose rows were put one behind the other, and their dimensions of rows; none if nothing was."""
        return [(tensor.graph.get_tensor_by_name(name), axis) for name, axis in self._joined.get(tensor.name, [])]

    def compares(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on other rows, and not only on places of rows."""
        return self._found.get(tensor.name) == _OTHERS

    def follows_numbers(self, tensor: tf.Tensor) -> bool:
        """Returns whether rows were taken or put together by numbers that the batch brings, as the nodes of merged graphs are."""
        return tensor.name in self._by_numbers

    def note(self, tensor: tf.Tensor) -> None:
        """Notes that a tensor depends on what all rows have in common."""
        self._found[tensor.name] = _OTHERS

    def known(self, tensor: tf.Tensor) -> KnownComparison:
        """Returns what is known of a tensor, for what is the same one in another graph."""
        return KnownComparison(
            is_from_values=tensor.name in self._from_values,
            state=self._found.get(tensor.name),
            is_chosen=tensor.name in self._chosen,
            is_counted_anew=tensor.name in self._counted_anew,
            multiple=self._multiples.get(tensor.name, Fraction(1)),
            is_own_seed=tensor.dtype.is_integer and self._is_own_seed(tensor),
        )

    def begin_with(self, tensor: tf.Tensor, known: KnownComparison) -> None:
        """Notes what is known of a tensor of another graph that is this one here."""
        self._given.add(tensor.name)
        for names, is_so in (
            (self._from_values, known.is_from_values),
            (self._chosen, known.is_chosen),
            (self._counted_anew, known.is_counted_anew),
            (self.own_seeds, known.is_own_seed),
        ):
            if is_so:
                names.add(tensor.name)
        if known.multiple != 1:
            self._multiples[tensor.name] = known.multiple
        if known.state is not None:
            self._found[tensor.name] = known.state

    def forget(self, tensor: tf.Tensor) -> None:
        """Takes back that a tensor depends on others."""
        del self._found[tensor.name]

    def says_where(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on places of rows, all or chosen ones, and on no other rows."""
        return self._found.get(tensor.name) in (_PLACES, _CHOICE)

    def follow(self, operation: Any, is_data: bool, inputs: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> None:
        """Notes what becomes of rows in an operation.

        Args:
            operation: The next one of the graph.
            is_data: Whether it brings the batch.
            inputs: Those of its inputs that differ between replicas.
            counts: Those, or the dimensions that make them up, that come from the number of rows.
        """
        outputs = {output.name for output in operation.outputs}
        from_values = [each for each in inputs if each.name in self._from_values]
        only_shape = operation.type in OF_SHAPES | {"ZerosLike", "OnesLike"}
        if is_data or from_values and not only_shape or operation.op_def.is_stateful and counts:
            self._from_values |= outputs
        if self._counts_anew(operation, inputs, counts):
            self._counted_anew |= outputs
        found = self._of(operation, inputs, counts)
        if found is not None:
            numbers = operation.inputs[1:2] if operation.type in _BY_NUMBERS else ()
            if any(each.name in self._from_values for each in numbers) or any(map(self.follows_numbers, inputs)):
                self._by_numbers |= outputs
            self._found.update(dict.fromkeys(outputs, found))
            return
        with_rows = self._with_rows(from_values)
        self._note_multiple(operation, with_rows)
        self._note_chosen(operation, inputs)
        joined = self._parts(operation) or next(filter(None, map(self.joined, with_rows)), [])
        if joined and not only_shape:
            names = [(each.name, axis) for each, axis in joined]
            self._joined.update((output.name, names) for output in operation.outputs if self._axes[output] is not None)

    def counts_chosen(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor without rows comes from how many rows were chosen."""
        return tensor.name in self._chosen and self._axes[tensor] is None

    def _note_chosen(self, operation: Any, inputs: Sequence[tf.Tensor]) -> None:
        has_chosen = [each for each in inputs if each.name in self._chosen]
        keeps = any(self._axes[each] is None for each in has_chosen) or operation.type in OF_SHAPES
        is_chosen = has_chosen and (keeps or any(self._axes[output] is not None for output in operation.outputs))
        if operation.type != "RaggedTensorToTensor" and (is_chosen or self._is_choice(operation)):
            self._chosen.update(output.name for output in operation.outputs)

    def _parts(self, operation: Any) -> list[tuple[tf.Tensor, int]]:
        if operation.type == "Reshape" and self._is_flattened(operation):
            before = operation.inputs[0]
            axis = axis_of(self._axes, before)
            return [(before, axis)] * int(before.shape[:axis].num_elements() or 0)
        if not joins_parts(self._axes, operation) or is_of_ragged_rows(operation):
            return []
        *tensors, _ = operation.inputs
        return [part for each in tensors for part in self.joined(each) or [(each, axis_of(self._axes, each))]]

    def _of(self, operation: Any, inputs: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> str | None:
        found = self._judged(operation, inputs, counts)
        is_new = found is not None and not any(each in self for each in inputs)
        return None if is_new and is_of_ragged_rows(operation) else found

    def _judged(self, operation: Any, inputs: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> str | None:
        kind = operation.type
        states = {self._found[each.name] for each in inputs if each in self}
        if "Random" in kind and self._draws_for_rows(operation):
            return _OTHERS if self._draws_by_place(operation) else None
        if _OTHERS in states:
            return _OTHERS
        if states and kind in _AT_PLACES and self._is_for_each_row(operation):
            return _OTHERS if any(map(self.joined, inputs)) else None
        if states and kind in _MOVES and self._moves(operation, counts):
            return _OTHERS
        if states and kind in _OF_SEGMENTS and self._has_segments_for_rows(operation, counts):
            return None
        with_rows = self._with_rows(inputs)
        valued = [each for each in with_rows if each.name in self._from_values and each not in self]
        chosen_mean = kind == "Mean" and any(each.name in self._chosen for each in valued)
        if not is_of_lengths(operation) and mixes_rows_by_itself(self._axes, operation, valued):
            return _OTHERS
        if kind in _OF_DIAGONALS and self._are_in_matrix(with_rows):
            return _OTHERS
        if kind == "Reshape" and valued and self._regroups(operation):
            return _OTHERS
        if kind in _OF_VECTORS and any(each.shape.rank == 1 and self._multiples.get(each.name, 1) == 1 for each in valued):
            return _OTHERS
        if kind in ("BroadcastTo", "Tile") and counts and valued and self._makes_pairs(operation, counts):
            return _OTHERS
        if kind in _OF_SEGMENTS - {"UnsortedSegmentSum"} and valued and not self._has_segments_for_rows(operation, counts):
            return _OTHERS
        if kind == "Fill" and len(counts) > 1 or chosen_mean and self._is_over_rows(operation):
            return _OTHERS
        if kind == "Where" and valued or _CHOICE in states:
            return _CHOICE
        return _PLACES if states or kind == "Range" and counts or self._makes_places(operation, valued) else None

    def _draws_for_rows(self, operation: Any) -> bool:
        """Whether numbers are drawn for the rows of tensors, as by dropout, whatever these rows were compared with."""
        left, shaped = [operation.inputs[0]], list[tf.Tensor]()
        while left:
            op = left.pop().op
            left += op.inputs[:1] if op.type in ("Cast", "Identity", "StridedSlice") else op.inputs if op.type == "Pack" else ()
            shaped += op.inputs if op.type == "Shape" else ()
        return bool(shaped) and all(map(self._has_a_row_for_each, shaped))

    def _draws_by_place(self, operation: Any) -> bool:
        """Whether a row gets what its place says, since all replicas draw with one seed, such as `seed=[3, step]`."""
        return operation.type.startswith("Stateless") and not any(map(self._is_own_seed, operation.inputs[1:]))

    def _is_own_seed(self, seed: tf.Tensor) -> bool:
        """Whether a replica may have a seed for itself."""
        left, seen = [seed], set[str]()
        while left:
            tensor = left.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            if tensor.name in self.own_seeds or tensor.name in self._from_values:
                return True
            if tensor.name in self._given or tensor.op.type in _READS:
                continue
            if tensor.op.type == "Placeholder" or tensor.op.op_def.is_stateful:
                return True
            left += tensor.op.inputs
        return False

    def _has_a_row_for_each(self, tensor: tf.Tensor) -> bool:
        """Whether the shape of a tensor follows from the number of rows of the batch, whatever else these were compared with."""
        of_batch = self._axes[tensor] is not None and tensor.name not in self._chosen | self._counted_anew
        return of_batch and [*tensor.shape].count(None) == 1

    def _counts_anew(self, operation: Any, inputs: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> bool:
        """Whether the number of rows of what an operation computes is none that replicas could add up."""
        is_cut = operation.type in _CUTTING and not (operation.type == "TopKV2" and counts)
        is_cut = is_cut and mixes_rows_by_itself(self._axes, operation, self._with_rows(inputs))
        return is_cut or operation.type in _COUNTING or any(each.name in self._counted_anew for each in inputs)

    def _with_rows(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [each for each in tensors if self._axes[each] is not None]

    def _is_for_each_row(self, operation: Any) -> bool:
        """Whether one of `_AT_PLACES` is given places of rows, such as those that a mask chooses, and does what it does to each."""
        if operation.type not in ("GatherNd", "GatherV2"):
            return True
        rows = operation.inputs[0]
        along = operation.inputs[2] if operation.type == "GatherV2" else None
        is_along_rows = self._axes[rows] == 0 and (along is None or tf.get_static_value(along) == 0)
        return is_along_rows and rows not in self and rows.name in self._from_values

    def _makes_places(self, operation: Any, valued: Sequence[tf.Tensor]) -> bool:
        """Whether an operation makes places of values: sets, and sums and parts of lengths, of which ragged tensors are made."""
        if operation.type in _SETS:
            return bool(valued)
        return is_of_lengths(operation) and mixes_rows_by_itself(self._axes, operation, valued)

    def _moves(self, operation: Any, counts: Sequence[tf.Tensor]) -> bool:
        places = operation.inputs[0]
        if places not in self or (axis := self._axes[places]) is None:
            return False
        if operation.type == "FloorMod":
            return bool(counts)
        if operation.type in RULES:
            return RULES[operation.type](operation, axis)
        return is_along_an_input(self._axes, operation)

    @staticmethod
    def _has_segments_for_rows(operation: Any, counts: Sequence[tf.Tensor]) -> bool:
        return operation.inputs[2].name in {each.name for each in counts}

    def _makes_pairs(self, operation: Any, counts: Sequence[tf.Tensor]) -> bool:
        before, after = operation.inputs[0], operation.outputs[0]
        axis = axis_of(self._axes, before)
        if operation.type == "Tile":
            return True
        return len(counts) > 1 or after.shape.rank - before.shape.rank + axis > 0 and after.shape[0] is None

    def _is_choice(self, operation: Any) -> bool:
        return operation.type == "DynamicPartition" or any(self._found.get(each.name) == _CHOICE for each in operation.inputs)

    def _note_multiple(self, operation: Any, with_rows: Sequence[tf.Tensor]) -> None:
        if not with_rows:
            return
        is_reshape = operation.type == "Reshape"
        multiple = self._multiple_after(operation) if is_reshape else self._multiples.get(with_rows[0].name, Fraction(1))
        if multiple != 1:
            self._multiples.update((output.name, multiple) for output in operation.outputs)

    def _multiple_after(self, reshape: Any) -> Fraction | None:
        before, after = reshape.inputs[0], reshape.outputs[0]
        axis, new_axis, multiple = self._axes[before], self._axes[after], self._multiples.get(before.name, Fraction(1))
        if axis is None or new_axis is None or multiple is None:
            return None
        row, new_row = before.shape[axis + 1 :].num_elements(), after.shape[new_axis + 1 :].num_elements()
        return multiple * Fraction(row, new_row) if row and new_row else None

    def _regroups(self, reshape: Any) -> bool:
        """Whether a row of the new shape has elements of several rows, or rows are in another order."""
        before, after = reshape.inputs[0], reshape.outputs[0]
        axis, new_axis = self._axes[before], self._axes[after]
        if axis is None or new_axis is None:
            return False
        outer, new_outer = before.shape[:axis].num_elements(), after.shape[:new_axis].num_elements()
        multiple = self._multiple_after(reshape)
        is_other_order = outer is not None and new_outer is not None and outer != new_outer
        is_other_order = is_other_order and not self._is_flattened(reshape)
        return is_other_order or multiple is not None and multiple.denominator != 1

    def _is_flattened(self, reshape: Any) -> bool:
        """Whether parts that were stacked before the rows, such as views, come one behind the other."""
        before, after = reshape.inputs[0], reshape.outputs[0]
        axis = self._axes[before]
        if not axis or self._axes[after] != 0 or before.shape.rank - after.shape.rank != axis or self.joined(before):
            return False
        return bool(before.shape[:axis].num_elements()) and before.shape[axis + 1 :].as_list() == after.shape[1:].as_list()

    def _are_in_matrix(self, tensors: Sequence[tf.Tensor]) -> bool:
        return any(axis_of(self._axes, each) >= each.shape.rank - 2 for each in tensors)

    def _is_over_rows(self, reduction: Any) -> bool:
        return self._axes[reduction.inputs[0]] in reduced_axes(reduction)
