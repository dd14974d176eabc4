"""Values of small integer tensors that a step computes from sizes, as numbers and multiples of the batch's rows.

Such a tensor is represented by an array of `Size` objects. From a global size in the traced program a replica can then compute the
size of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.partitioner.placements import WHOLE, Rows, Size, is_number, product

_MOST = 256
"""The largest number of elements that are tracked."""

Sizes = Any
"""An array of `Size` objects."""


def array(values: Any) -> Sizes:
    """Returns sizes, or one, as an array of objects."""
    if isinstance(values, (list, tuple)):
        result = np.empty(len(values), object)
        result[:] = [int(v) if is_number(v) else v for v in values]
        return result
    result = np.empty((), object)
    result[()] = int(values) if is_number(values) else values
    return result


def of_constant(value: np.ndarray) -> Sizes | None:
    """Returns a constant as sizes; None if it is too large, or not of integers."""
    return value.astype(object) if value.size <= _MOST and np.issubdtype(value.dtype, np.integer) else None


def numbers(sizes: Sizes | None) -> Any:
    """Returns sizes as integers; None unless all are numbers."""
    if sizes is None or not all(is_number(v) for v in sizes.flat):
        return None
    return sizes.astype(np.int64)


def _each(function: Callable[..., Size]) -> Callable[..., Sizes]:
    def compute(operation: Any, *inputs: Sizes) -> Sizes:
        result = np.frompyfunc(lambda *v: None if any(x is None for x in v) else function(*v), len(inputs), 1)(*inputs)
        return result if isinstance(result, np.ndarray) else array(result)

    return compute


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Size]:
    return lambda *values: int(function(*values)) if all(is_number(v) for v in values) else None


def _strided_slice(operation: Any, x: Sizes, begin: Sizes, end: Sizes, strides: Sizes) -> Sizes | None:
    if x.ndim != 1 or len(begin) != 1 or operation.get_attr("ellipsis_mask") or operation.get_attr("new_axis_mask"):
        return None
    first, last, step = begin[0], end[0], strides[0]
    if operation.get_attr("shrink_axis_mask"):
        return None if not is_number(first) or not -len(x) <= first < len(x) else array(x[first])
    first = None if operation.get_attr("begin_mask") else first
    last = None if operation.get_attr("end_mask") else last
    if not is_number(step) or any(bound is not None and not is_number(bound) for bound in (first, last)):
        return None
    return x[slice(first, last, step)]


def _gather(operation: Any, x: Sizes, indices: Sizes, axis: Sizes) -> Sizes | None:
    chosen = numbers(indices)
    is_plain = x.ndim == 1 and chosen is not None and not operation.get_attr("batch_dims")
    return np.asarray(x[chosen], object) if is_plain and ((chosen >= 0) & (chosen < len(x))).all() else None


def _slice(operation: Any, x: Sizes, begin: Sizes, size: Sizes) -> Sizes | None:
    first, count = numbers(begin), numbers(size)
    if first is None or count is None:
        return None
    return x[tuple(slice(i, None if n == -1 else i + n) for i, n in zip(first, count, strict=True))]


def _range(operation: Any, start: Sizes, limit: Sizes, delta: Sizes) -> Sizes | None:
    bounds = [numbers(x) for x in (start, limit, delta)]
    if any(x is None for x in bounds):
        return None
    result = np.arange(*map(int, bounds))
    return result.astype(object) if result.size <= _MOST else None


def _concat(operation: Any, *inputs: Sizes) -> Sizes | None:
    *parts, axis = inputs
    is_known = len({x.ndim for x in parts}) == 1 and parts[0].ndim and numbers(axis) is not None
    return np.concatenate(parts, int(axis[()])) if is_known else None


def _pack(operation: Any, *inputs: Sizes) -> Sizes:
    return np.stack(inputs, operation.get_attr("axis"))


def _transpose(operation: Any, x: Sizes, order: Sizes) -> Sizes | None:
    axes = numbers(order)
    return None if axes is None else x.transpose(axes)


def _inverted(operation: Any, order: Sizes) -> Sizes | None:
    axes = numbers(order)
    return None if axes is None else np.argsort(axes).astype(object)


def _concat_offset(operation: Any, axis: Sizes, *shapes: Sizes) -> list[Sizes] | None:
    place = numbers(axis)
    if place is None:
        return None
    offsets: list[Sizes] = []
    before: Size = 0
    for shape in shapes:
        offsets.append(np.zeros(shape.shape, object))
        offsets[-1][place] = before
        before = None if before is None or shape[place] is None else before + shape[place]
    return offsets


def _pad(operation: Any, x: Sizes, paddings: Sizes, value: Sizes | None = None) -> Sizes | None:
    around = numbers(paddings)
    if x.ndim != 1 or around is None:
        return None
    before, behind = (np.full(count, 0 if value is None else value[()], object) for count in around[0])
    return np.concatenate([before, x, behind])


def _split(operation: Any, x: Sizes, counts: Sizes, axis: Sizes) -> list[Sizes] | None:
    known = numbers(counts)
    if x.ndim != 1 or known is None:
        return None
    known = np.where(known == -1, len(x) - known.sum() - 1, known)
    return np.split(x, known.cumsum()[:-1])


def _tile(operation: Any, x: Sizes, times: Sizes) -> Sizes | None:
    known = numbers(times)
    return None if x.ndim != 1 or known is None or x.size * known[0] > _MOST else np.tile(x, known[0])


def _reshape(operation: Any, x: Sizes, shape: Sizes) -> Sizes | None:
    wanted = numbers(shape)
    return None if wanted is None else x.reshape(wanted)


def _squeeze(operation: Any, x: Sizes) -> Sizes:
    return x.reshape([d for d in x.shape if d != 1])


def _expand(operation: Any, x: Sizes, axis: Sizes) -> Sizes | None:
    return x.reshape([1]) if x.ndim == 0 else None


def _fill(operation: Any, dims: Sizes, value: Sizes) -> Sizes | None:
    shape = numbers(dims)
    return None if shape is None or shape.prod() > _MOST else np.full(shape, value[()], object)


def _prod(operation: Any, x: Sizes, axes: Sizes) -> Sizes | None:
    return array(product(x)) if x.ndim == 1 and not operation.get_attr("keep_dims") and axes.size == 1 else None


def _max(operation: Any, x: Sizes, axes: Sizes) -> Sizes | None:
    if x.ndim != 1 or operation.get_attr("keep_dims") or axes.size != 1 or not x.size:
        return None
    known = numbers(x)
    return array(x[0] if all(size == x[0] for size in x) else None if known is None else known.max())


def _sum(operation: Any, x: Sizes, axes: Sizes) -> Sizes | None:
    if x.ndim != 1 or operation.get_attr("keep_dims") or axes.size != 1:
        return None
    total: Size = 0
    for size in x:
        total = None if total is None or size is None else total + size
    return array(total)


def _broadcast(a: Sizes, b: Sizes) -> list[tuple[Size, Size]]:
    rank = max(len(a), len(b))
    return list(zip([1] * (rank - len(a)) + list(a), [1] * (rank - len(b)) + list(b), strict=True))


def broadcast_axes(operation: Any, a: Sizes, b: Sizes) -> list[Sizes] | None:
    """Returns the axes along which the gradients of two operands are summed; None unless they are known.

    The axis of the batch's rows is never among them, even if the batch has one row: the sum over one row is the row.
    """
    pairs = _broadcast(a, b)
    if any(x is None or y is None or (x != y and 1 not in (x, y)) for x, y in pairs):
        return None
    return [array([i for i, pair in enumerate(pairs) if pair[side] == 1]) for side in (0, 1)]


def _broadcast_shape(operation: Any, a: Sizes, b: Sizes) -> Sizes:
    return array([y if x == 1 else x if y in (1, x) else None for x, y in _broadcast(a, b)])


def _stitch(operation: Any, *inputs: Sizes) -> Sizes | None:
    places, values = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    known = [numbers(x) for x in places]
    if any(x is None for x in known) or any(x.ndim > 1 or x.shape != p.shape for p, x in zip(places, values, strict=True)):
        return None
    result = np.full(1 + max((int(x.max()) for x in known if x.size), default=-1), None, dtype=object)
    for where, value in zip(known, values, strict=True):
        result[where] = value[()] if value.ndim == 0 else value
    return result


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "AddV2": _each(lambda a, b: a + b),
    "BroadcastArgs": _broadcast_shape,
    "BroadcastGradientArgs": broadcast_axes,
    "Cast": lambda operation, x: x,
    "ConcatOffset": _concat_offset,
    "ConcatV2": _concat,
    "DynamicStitch": _stitch,
    "ExpandDims": _expand,
    "Fill": _fill,
    "FloorDiv": _each(lambda a, b: a // b if not is_number(b) or b else None),
    "FloorMod": _each(_of_numbers(lambda a, b: a % b if b else 0)),
    "GatherV2": _gather,
    "InvertPermutation": _inverted,
    "Identity": lambda operation, x: x,
    "Max": _max,
    "Maximum": _each(lambda a, b: a if a == b else max(a, b) if is_number(a) and is_number(b) else None),
    "Minimum": _each(lambda a, b: a if a == b else min(a, b) if is_number(a) and is_number(b) else None),
    "Mul": _each(lambda a, b: a * b),
    "Neg": _each(_of_numbers(lambda a: -a)),
    "Pack": _pack,
    "Pad": _pad,
    "PadV2": _pad,
    "Prod": _prod,
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "SplitV": _split,
    "Squeeze": _squeeze,
    "StopGradient": lambda operation, x: x,
    "StridedSlice": _strided_slice,
    "Sub": _each(lambda a, b: a - b),
    "Sum": _sum,
    "Tile": _tile,
    "Transpose": _transpose,
}


def computed(operation: Any, inputs: Sequence[Sizes | None]) -> list[Sizes | None]:
    """Returns the sizes that an operation computes, for each of its outputs; None for unknown ones.

    Args:
        operation: The operation of the traced graph.
        inputs: The values of its inputs, as far as known.
    """
    unknown: list[Sizes | None] = [None] * len(operation.outputs)
    function = _FUNCTIONS.get(operation.type)
    is_whole = all(t.dtype in (tf.int32, tf.int64) for t in operation.outputs)
    if operation.type == "Pack":  # Some of its elements may be known.
        inputs = [array(None) if x is None and t.shape.rank == 0 else x for x, t in zip(inputs, operation.inputs, strict=True)]
    if function is None or not is_whole or any(x is None for x in inputs):
        return unknown
    result = function(operation, *inputs)
    if result is None:
        return unknown
    return result if isinstance(result, list) else [result]


_TRIED = 1_009, 2_003


def inferred(operation: Any, dims: Sequence[Sequence[Size]]) -> list[list[Size] | None]:
    """Infers the shapes of results by TensorFlow's shape functions, which get two numbers in place of the rows.

    Args:
        operation: An operation whose results have sizes that depend on those of its inputs alone, not on values.
        dims: The global shape of each input: numbers, and multiples of the rows of a batch that each replica has whole.
    """
    found = []
    for rows in _TRIED:
        definition = tf.compat.v1.GraphDef()
        for i, (x, each) in enumerate(zip(operation.inputs, dims, strict=True)):
            given = definition.node.add(name=f"x{i}", op="Placeholder")
            given.attr["dtype"].type = x.dtype.as_datatype_enum
            given.attr["shape"].shape.CopyFrom(tf.TensorShape([d if is_number(d) else d.per_row * rows for d in each]).as_proto())
        node = definition.node.add(name="result", op=operation.type, input=[f"x{i}" for i in range(len(dims))])
        for name, value in operation.node_def.attr.items():
            if not name.startswith("_"):
                node.attr[name].CopyFrom(value)
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(definition, name="")
        found.append([x.shape for x in graph.get_operation_by_name("result").outputs])
    return [None if x.rank is None else list(map(_size_of_both, x, y)) for x, y in zip(*found, strict=True)]


def _size_of_both(one: int | None, other: int | None) -> Size:
    if one == other:
        return one
    (per_row, rest), (again, left) = (divmod(size or 0, rows) for size, rows in zip((one, other), _TRIED, strict=True))
    return Rows(per_row, WHOLE) if per_row == again and per_row and not rest and not left else None
