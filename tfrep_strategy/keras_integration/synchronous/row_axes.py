"""In which dimension the tensors of a graph have the rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

REDUCTIONS = {"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"}
MATRIX_PRODUCTS = {
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
    "MatMul": ("transpose_a", "transpose_b"),
}
"""Operations on matrices, and by which attributes they exchange the last two dimensions of each."""

OF_SHAPES = {"Rank", "Shape", "ShapeN", "Size"}
_MADE = {"BroadcastTo", "Fill", "Range", "Tile"}
"""Operations that make as many rows as they are told."""

_NOWHERE = -1


class RowsOf(NamedTuple):
    """Whether a tensor has rows, and in which dimension, if that is not the first one of unknown size."""

    has_rows: bool
    moved_to: int | None


class RowAxes:
    """Finds the dimension of rows: the first, if its size is not known, or that to which an operation has moved it.

    Only what comes from the batch, or was made for each of its rows, has rows. The length of a sentence is not known either.
    """

    def __init__(self) -> None:
        self._of_rows: set[str] = set()
        self._moved: dict[str, int] = {}
        """The dimensions of tensors, by their names, that are not the first one of unknown size."""

    def __getitem__(self, tensor: tf.Tensor) -> int | None:
        """Returns the dimension; None if the tensor has no rows."""
        if tensor.name not in self._of_rows:
            return None
        axis = self._moved.get(tensor.name, _usual(tensor))
        return None if axis == _NOWHERE else axis

    def follow(self, operation: Any, is_data: bool, inputs: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> None:
        """Notes where an operation has moved the rows.

        Args:
            operation: The next one of the graph.
            is_data: Whether it brings the batch.
            inputs: Those of its inputs that differ between replicas.
            counts: Those, or the dimensions that make them up, that are numbers of rows.
        """
        if operation.type not in OF_SHAPES:
            is_made = bool(counts) and (operation.type in _MADE or operation.op_def.is_stateful or "Random" in operation.type)
            if is_data or is_made or any(map(self._may_have_rows, inputs)):
                self._of_rows.update(output.name for output in operation.outputs)
        if operation.outputs and operation.outputs[0].dtype == tf.variant:
            self._follow_list(operation)
        if len(operation.outputs) != 1 or not operation.outputs[0].shape.rank:
            return
        output = operation.outputs[0]
        axis = _counted(operation, counts) if operation.type == "Reshape" else None
        axis = self._of_output(operation, output) if axis is None else axis
        if axis is not None and axis != _usual(output) and (axis == _NOWHERE or output.shape[axis] is None):
            self._moved[output.name] = axis

    def _follow_list(self, operation: Any) -> None:
        """Notes in which dimension the elements of a list have rows."""
        place = {"Identity": 0, "TensorListSetItem": 2}.get(operation.type)
        if place is not None and (axis := self[operation.inputs[place]]) is not None:
            self._moved[operation.outputs[0].name] = axis

    def note(self, tensor: tf.Tensor, axis: int | None = None) -> None:
        """Notes that a tensor has rows: in its first dimension, or in the given one. A list has them in those of its elements."""
        self._of_rows.add(tensor.name)
        if axis is not None:
            self._moved[tensor.name] = axis

    def known(self, tensor: tf.Tensor) -> RowsOf:
        """Returns what is known of a tensor, for what is the same one in another graph."""
        return RowsOf(tensor.name in self._of_rows, self._moved.get(tensor.name))

    def _may_have_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has rows, if only in a dimension that nobody knows: loops keep them in lists, for example."""
        is_number = tensor.shape.rank == 0 and tensor.dtype != tf.variant
        return tensor.name in self._of_rows and self._moved.get(tensor.name) != _NOWHERE and not is_number

    def are_contracted(self, product: Any) -> bool:
        """Returns whether a product of matrices adds up the rows."""
        return any(self[matrix] == inner for matrix, inner, _ in matrices(product))

    def _of_output(self, operation: Any, output: tf.Tensor) -> int | None:
        kind, inputs = operation.type, operation.inputs
        if kind in MATRIX_PRODUCTS:
            return self._of_product(operation, output)
        if kind == "Einsum":
            return self._of_einsum(operation)
        if not inputs or (axis := self[inputs[0]]) is None:
            return self._of_elements(inputs, output)
        if kind == "BroadcastTo":
            return int(output.shape.rank - inputs[0].shape.rank + axis)
        if kind == "TensorListGetItem":
            return axis
        if kind == "TensorListStack":
            return axis + 1
        if kind == "Transpose":
            order = tf.get_static_value(inputs[1])
            return _only_unknown(inputs[0], output) if order is None else order.tolist().index(axis)
        if kind == "StridedSlice":
            return strided_slice(operation).dimensions.get(axis)
        if kind == "ExpandDims":
            place = tf.get_static_value(inputs[1])
            return None if place is None else axis + (place.item() % output.shape.rank <= axis)
        if kind == "Pack":
            return axis + (operation.get_attr("axis") % output.shape.rank <= axis)
        if kind == "Squeeze":
            gone = operation.get_attr("squeeze_dims") or [i for i, size in enumerate(inputs[0].shape) if size == 1]
            return axis - sum(i % inputs[0].shape.rank < axis for i in gone)
        if kind == "Reshape":
            return _only_unknown(inputs[0], output)
        if kind in REDUCTIONS:
            if tf.get_static_value(inputs[1]) is None:
                return None  # Backward undoes a broadcast that the run may have made.
            gone = reduced_axes(operation)
            return _NOWHERE if axis in gone else axis if operation.get_attr("keep_dims") else axis - sum(i < axis for i in gone)
        return self._of_elements(inputs, output)

    def _of_product(self, product: Any, output: tf.Tensor) -> int | None:
        if self.are_contracted(product):
            return _NOWHERE
        for place, (matrix, _, outer) in enumerate(matrices(product)):
            axis = self[matrix]
            if axis == outer:
                return int(output.shape.rank - 2 + place)
            if axis is not None and axis < matrix.shape.rank - 2:
                return int(output.shape.rank - matrix.shape.rank + axis)
        return None

    def _of_einsum(self, einsum: Any) -> int | None:
        given, _, result = einsum.get_attr("equation").decode().partition("->")
        terms = zip(given.split(","), einsum.inputs, strict=True)
        labels = [term[axis] for term, tensor in terms if (axis := self[tensor]) is not None and "." not in term]
        if not labels or "." in result:
            return None
        return next((result.index(label) for label in labels if label in result), _NOWHERE)

    def _of_elements(self, inputs: Sequence[tf.Tensor], output: tf.Tensor) -> int | None:
        """Returns the dimension of an operation on elements, whose tensors are aligned at their last dimensions."""
        if output.shape.rank != max([t.shape.rank or 0 for t in inputs], default=0):
            return None
        found = [int(output.shape.rank - t.shape.rank + axis) for t in inputs if (axis := self[t]) is not None]
        if not found:
            return _NOWHERE if any(self._moved.get(t.name) == _NOWHERE for t in inputs) else None
        return _usual(output) if _usual(output) in found else found[0]


class StridedSlice(NamedTuple):
    """What a strided slice, such as `x[:, None]`, takes of a tensor.

    Attributes:
        dimensions: In which dimension of the result each one of the tensor is; without those that it removes.
        cut: The dimensions that it does not take whole, and those that it removes.
    """

    dimensions: dict[int, int]
    cut: set[int]


def strided_slice(operation: Any) -> StridedSlice:
    """Returns what an operation of this type takes."""
    masks = [operation.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")]
    begin, end, strides = (tf.get_static_value(each, partial=True) for each in operation.inputs[1:])
    is_known = all(each is not None for each in (begin, end, strides))
    rank, found = operation.inputs[0].shape.rank, StridedSlice({}, set())
    terms = range(operation.inputs[1].shape.num_elements() or 0)
    dimension = place = 0
    for term in terms:
        is_ellipsis, is_new, is_removed, from_first, to_last = (mask >> term & 1 for mask in masks)
        if is_ellipsis:
            whole = rank - dimension - sum(not masks[1] >> i & 1 for i in terms if i > term)
            found.dimensions.update((dimension + i, place + i) for i in range(whole))
            dimension, place = dimension + whole, place + whole
        elif is_new:
            place += 1
        else:
            from_first = from_first or begin is not None and begin[term] == 0
            if is_removed or is_known and not (from_first and to_last and strides[term] == 1):
                found.cut.add(dimension)
            if not is_removed:
                found.dimensions[dimension] = place
                place += 1
            dimension += 1
    found.dimensions.update((i, place + i - dimension) for i in range(dimension, rank))
    return found


def reduced_axes(reduction: Any) -> set[int]:
    """Returns which dimensions a reduction removes; all, if only the run knows."""
    rank = reduction.inputs[0].shape.rank or 0
    axes = tf.get_static_value(reduction.inputs[1])
    return set(range(rank)) if axes is None else {axis % rank for axis in axes.reshape(-1).tolist() if rank}


def matrices(product: Any) -> list[tuple[tf.Tensor, int, int]]:
    """Returns both matrices of one of `MATRIX_PRODUCTS`, with the dimension that is added up and the other one."""
    exchanged = [product.get_attr(name) for name in MATRIX_PRODUCTS[product.type]]
    ranks = [matrix.shape.rank or 0 for matrix in product.inputs]
    (left, right), (m, n) = product.inputs, ranks
    inner_and_outer = [(m - 1, m - 2), (n - 2, n - 1)]
    return [
        (matrix, *(reversed(pair) if swap else pair))
        for matrix, pair, swap in zip((left, right), inner_and_outer, exchanged, strict=True)
    ]


def _counted(reshape: Any, counts: Sequence[tf.Tensor]) -> int | None:
    """Returns the only dimension of a new shape that comes from the number of rows."""
    shape, names = reshape.inputs[1].op, {each.name for each in counts}
    found = [i for i, size in enumerate(shape.inputs) if size.name in names] if shape.type == "Pack" else []
    return found[0] if len(found) == 1 else None


def _only_unknown(before: tf.Tensor, after: tf.Tensor) -> int | None:
    """Returns the dimension of unknown size, if both tensors have one."""
    unknown = [i for i, size in enumerate(after.shape) if size is None]
    return unknown[0] if len(unknown) == 1 and list(before.shape).count(None) == 1 else None


def _usual(tensor: tf.Tensor) -> int | None:
    return 0 if tensor.shape.rank and tensor.shape[0] is None else None
