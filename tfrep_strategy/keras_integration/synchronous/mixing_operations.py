"""Which single operations mix the rows of a batch: compare them in pairs, sort, choose, shift, cut or count them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.synchronous.row_axes import (
    MATRIX_PRODUCTS,
    RowAxes,
    matrices,
    reduced_axes,
    strided_slice,
)

_ELEMENTWISE = {
    "Add", "AddV2", "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "DivNoNan", "Equal", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "NotEqual", "Pow",
    "RealDiv", "SelectV2", "SquaredDifference", "Sub", "Xdivy", "Xlogy",
}  # fmt: skip
_ALONG_THE_LAST = {
    "LogSoftmax", "Softmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "TopKV2",
}  # fmt: skip
_ALONG_AN_INPUT = {"ArgMax", "ArgMin", "Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2", "Roll"}
_OF_MATRICES = {
    "BatchMatrixInverse", "Cholesky", "LogMatrixDeterminant", "LuV2", "MatrixDeterminant", "MatrixInverse", "MatrixSolve",
    "MatrixSolveLs", "MatrixTriangularSolve", "Qr", "SelfAdjointEigV2", "Svd",
}  # fmt: skip
OF_ALL_ELEMENTS = {
    "HistogramFixedWidth", "SegmentMaxV2", "SegmentMean", "SegmentMinV2", "SegmentProdV2", "SegmentSumV2",
}  # fmt: skip
_SCATTERS = {"ScatterNd": 0, "TensorScatterAdd": 1, "TensorScatterUpdate": 1}
"""Operations that put something at indices, and which input these are."""

PADS = {"MirrorPad", "Pad", "PadV2"}
_WITHOUT_PARTS = {"EuclideanNorm", "Prod"}
"""Reductions whose value on all rows does not follow from that on the parts in a way that `row_reductions.py` knows."""


def mixes_rows_by_itself(axes: RowAxes, operation: Any, with_rows: Sequence[tf.Tensor]) -> bool:
    """Returns whether the rows of what an operation computes depend on other rows.

    Args:
        axes: Knows the dimensions of rows up to this operation.
        operation: An operation of a step's graph.
        with_rows: Those of its inputs that have rows.
    """
    kind = operation.type
    if not with_rows:
        return False
    if kind in MATRIX_PRODUCTS:
        return len(with_rows) > 1 and _pairs_in_product(axes, operation)
    if kind == "Einsum":
        return len(with_rows) > 1 and len(_labels_of_rows(axes, operation)) > 1
    if kind in _ELEMENTWISE:
        rank = operation.outputs[0].shape.rank
        return rank is not None and len({rank - each.shape.rank + axis_of(axes, each) for each in with_rows}) > 1
    if kind in ("ConcatV2", "Split", "SplitV", "Unpack"):
        return _cuts_or_joins(axes, operation, with_rows)
    if kind in OF_ALL_ELEMENTS:
        return True
    if kind in _SCATTERS:
        return operation.inputs[_SCATTERS[kind]].name in {each.name for each in with_rows}
    if kind in PADS:
        return any(_pads(operation, axis_of(axes, each)) for each in with_rows)
    first = operation.inputs[0]
    if first.name not in {each.name for each in with_rows}:
        return False
    axis, rank = axis_of(axes, first), int(first.shape.rank)
    if kind in _ALONG_THE_LAST:
        return axis == rank - 1
    if kind in _OF_MATRICES:
        return axis >= rank - 2
    if kind in _ALONG_AN_INPUT:
        return is_along_an_input(axes, operation)
    if kind in _WITHOUT_PARTS:
        return axis in reduced_axes(operation)
    return kind in RULES and RULES[kind](operation, axis)


def joins_parts(axes: RowAxes, operation: Any) -> bool:
    """Returns whether an operation puts tensors with rows one behind the other."""
    if operation.type != "ConcatV2":
        return False
    *parts, _ = operation.inputs
    return all(axes[each] is not None for each in parts) and _is_along_rows(axes, operation, parts)


def axis_of(axes: RowAxes, tensor: tf.Tensor) -> int:
    """Returns the dimension in which a tensor has rows; it has to have some."""
    axis = axes[tensor]
    assert axis is not None
    return axis


def _pairs_in_product(axes: RowAxes, product: Any) -> bool:
    (left, inner, _), (right, other_inner, _) = matrices(product)
    one, other = axis_of(axes, left), axis_of(axes, right)
    if (one == inner) and (other == other_inner):
        return False  # A sum over rows.
    are_of_the_batch = one < left.shape.rank - 2 and other < right.shape.rank - 2
    return not (are_of_the_batch and left.shape.rank - one == right.shape.rank - other)


def _labels_of_rows(axes: RowAxes, einsum: Any) -> set[str]:
    given = einsum.get_attr("equation").decode().partition("->")[0]
    terms = [(term, axes[tensor]) for term, tensor in zip(given.split(","), einsum.inputs, strict=True)]
    return {term[axis] for term, axis in terms if axis is not None and "." not in term}


def _cuts_or_joins(axes: RowAxes, operation: Any, with_rows: Sequence[tf.Tensor]) -> bool:
    if operation.type == "Unpack":
        tensor = operation.inputs[0]
        return operation.get_attr("axis") % tensor.shape.rank == axes[tensor]
    return _is_along_rows(axes, operation, with_rows) and not joins_parts(axes, operation)


def _is_along_rows(axes: RowAxes, operation: Any, with_rows: Sequence[tf.Tensor]) -> bool:
    place = {"ConcatV2": -1, "Split": 0, "SplitV": 2}[operation.type]
    along = tf.get_static_value(operation.inputs[place])
    return along is not None and any(along.item() % each.shape.rank == axes[each] for each in with_rows)


def is_along_an_input(axes: RowAxes, operation: Any) -> bool:
    """Returns whether an operation, such as `Roll`, goes along the rows, as an input of it tells."""
    along = tf.get_static_value(operation.inputs[2 if operation.type == "Roll" else 1])
    first = operation.inputs[0]
    return along is not None and axes[first] in {each % first.shape.rank for each in np.reshape(along, -1).tolist()}


def _gathers(operation: Any, axis: int) -> bool:
    along = tf.get_static_value(operation.inputs[2])
    return along is not None and along.item() % operation.inputs[0].shape.rank == axis and not operation.get_attr("batch_dims")


def _slices(operation: Any, axis: int) -> bool:
    if (offset := operation.inputs[1].op).type == "ConcatOffset":  # Backward takes apart what was joined, along one dimension.
        along = offset.inputs[0]
        along = tf.get_static_value(along.op.inputs[0] if along.op.type == "FloorMod" else along)
        return along is None or along.item() % operation.inputs[0].shape.rank == axis
    begin, size = (tf.get_static_value(each, partial=True) for each in operation.inputs[1:3])
    return begin is None or size is None or begin[axis] != 0 or size[axis] not in (-1, None)


def _pads(operation: Any, axis: int) -> bool:
    widths = operation.inputs[1]
    if widths.op.type == "Pack":  # That of one dimension, such as of the rows, is no constant.
        of_rows = tf.get_static_value(widths.op.inputs[axis])
        return of_rows is None or bool(of_rows.any())
    known = tf.get_static_value(widths)
    return known is not None and bool(known[axis].any())


def _slices_with_strides(operation: Any, axis: int) -> bool:
    return axis in strided_slice(operation).cut


def _repeats(operation: Any, axis: int) -> bool:
    multiples = tf.get_static_value(operation.inputs[1], partial=True)
    return multiples is not None and multiples[axis] != 1


def is_of_lengths(operation: Any) -> bool:
    """Returns whether an operation adds up or cuts a vector of whole numbers, such as where ragged rows begin and end."""
    if operation.type not in ("Cumsum", "StridedSlice"):
        return False
    return bool(operation.inputs[0].shape.rank == 1 and operation.inputs[0].dtype.is_integer)


RULES: dict[str, Callable[[Any, int], bool]] = {
    "GatherV2": _gathers,
    "Slice": _slices,
    "StridedSlice": _slices_with_strides,
    "Tile": _repeats,
}
"""Whether operations mix rows that are in a dimension of their first input."""
