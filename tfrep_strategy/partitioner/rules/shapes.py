"""Operations that return sizes, change shapes and the order of axes, or join and split tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.partitioner import sizes as by_value
from tfrep_strategy.partitioner.placements import (
    OF_LAYOUT,
    PARTIAL,
    REPLICATE,
    WHOLE,
    Partial,
    Replicate,
    Rows,
    Shard,
    Size,
    is_number,
    product,
)
from tfrep_strategy.partitioner.planner import Planner, always, rule


@rule("Const")
@always
def constant(plan: Planner, operation: Any) -> None:
    """Adds a constant. Its value is recorded if it may be a size."""
    (result,) = operation.outputs
    if result.dtype in (tf.int32, tf.int64) and (result.shape.num_elements() or 0) <= 256:
        value = tf.make_ndarray(operation.get_attr("value"))
        plan.put(result, REPLICATE, plan.program.constant(value, result.dtype))
        plan.sizes[result.name] = by_value.of_constant(value)
    else:
        plan.emit(operation, [], REPLICATE)


def _global_shape(plan: Planner, tensor: Any, dtype: tf.DType) -> Any:
    """Returns the shape of the global tensor, without replicating the tensor."""
    dims, add, placement = plan.dims(tensor), plan.program.add, plan.placement(tensor)
    shard = placement if isinstance(placement, Shard) else None
    local = None

    def of(axis: int, size: Size) -> Any:
        nonlocal local
        if is_number(size):
            return plan.program.constant(size, dtype)
        if isinstance(size, Rows):
            return plan.as_dtype(plan.elements(size).total, dtype)
        local = local or add("Shape", plan.local(tensor), out_type=dtype)
        return add("Squeeze", add("Slice", local, [axis], [1]), squeeze_dims=[0])

    if dims is not None and (shard is not None or all(d is not None for d in dims)):
        return add("Pack", [of(i, d) for i, d in enumerate(dims)], axis=0) if dims else plan.program.constant(np.zeros(0), dtype)
    whole = plan.replicated(tensor) if shard is not None else plan.local(tensor)
    return add("Shape", whole, out_type=dtype)


@rule("Shape", "ShapeN")
@always
def shape(plan: Planner, operation: Any) -> None:
    """Returns the shape of the global tensor."""
    for x, result in zip(operation.inputs, operation.outputs, strict=True):
        plan.put(result, REPLICATE, _global_shape(plan, x, result.dtype))
        dims = plan.dims(x)
        if dims is not None:
            plan.sizes[result.name] = by_value.array(dims)


@rule("Size")
@always
def size(plan: Planner, operation: Any) -> None:
    """Returns the number of elements of the global tensor."""
    (x,), (result,) = operation.inputs, operation.outputs
    plan.put(result, REPLICATE, plan.program.add("Prod", _global_shape(plan, x, result.dtype), 0))
    dims = plan.dims(x)
    plan.sizes[result.name] = by_value.array(None if dims is None else product(dims))


@rule("Rank")
@always
def rank(plan: Planner, operation: Any) -> None:
    """Returns the rank of a tensor."""
    (x,), (result,) = operation.inputs, operation.outputs
    known = plan.rank(x)
    if known is None:
        plan.put(result, REPLICATE, plan.program.add("Rank", plan.local(x)))
    else:
        plan.put(result, REPLICATE, plan.program.constant(known))
        plan.sizes[result.name] = by_value.array(known)


@rule("BroadcastGradientArgs")
@always
def broadcast_axes(plan: Planner, operation: Any) -> None:
    """Returns the axes along which the gradients of two operands are summed.

    They are constants if known. At run time, the axis of the rows would be among them if the batch had one row.
    """
    known = by_value.computed(operation, [plan.sizes_of(x) for x in operation.inputs])
    if any(x is None for x in known):
        plan.replicate(operation)
        return
    for result, axes in zip(operation.outputs, known, strict=True):
        plan.put(result, REPLICATE, plan.program.constant(by_value.numbers(axes), result.dtype))


@rule("Transpose", "ConjugateTranspose")
@always
def transpose(plan: Planner, operation: Any) -> None:
    """Moves the axis of the rows."""
    x, order = operation.inputs
    placement, axes = plan.placement(x), plan.numbers(order)
    inputs, dims = [plan.local(x), plan.replicated(order)], plan.dims(x)
    if isinstance(placement, Partial):
        plan.emit(operation, inputs, PARTIAL)
    elif isinstance(placement, Shard) and axes is not None:
        plan.emit(operation, inputs, placement.on([a % len(axes) for a in axes].index(placement.axis)))
    else:
        plan.replicate(operation)
    if axes is not None and dims is not None:
        plan.known_dims[operation.outputs[0].name] = [dims[a] for a in axes]


@rule("ExpandDims")
@always
def expand(plan: Planner, operation: Any) -> None:
    """Adds an axis of size 1."""
    x, where = operation.inputs
    placement, axis, known = plan.placement(x), plan.number(where), plan.rank(x)
    inputs = [plan.local(x), plan.replicated(where)]
    if isinstance(placement, Partial):
        plan.emit(operation, inputs, PARTIAL)
    elif isinstance(placement, Shard) and axis is not None and known is not None:
        before = axis % (known + 1) <= placement.axis
        plan.emit(operation, inputs, placement.on(placement.axis + before))
    else:
        plan.replicate(operation)
    dims = plan.dims(x)
    if axis is not None and dims is not None:
        axis %= len(dims) + 1
        plan.known_dims[operation.outputs[0].name] = [*dims[:axis], 1, *dims[axis:]]


@rule("Squeeze")
def squeeze(plan: Planner, operation: Any) -> None:
    """Removes axes of size 1."""
    (x,) = operation.inputs
    placement, known = plan.placement(x), plan.rank(x)
    axes = [axis % known for axis in operation.get_attr("squeeze_dims")] if known else []
    if not axes and all(map(is_number, dims := plan.dims(x) or [])):  # A replica's part may have size 1 where the whole has not.
        axes = [axis for axis, size in enumerate(dims) if size == 1]
    if isinstance(placement, Partial):
        plan.emit(operation, [plan.local(x)], PARTIAL)
    elif isinstance(placement, Shard) and axes and placement.axis not in axes:
        result = placement.on(placement.axis - sum(a < placement.axis for a in axes))
        plan.emit(operation, [plan.local(x)], result, squeeze_dims=axes)
    else:
        plan.replicate(operation)


@rule("Reshape")
@always
def reshape(plan: Planner, operation: Any) -> None:
    """Keeps rows sharded if the axes before theirs stay, and later axes are merged into theirs or split from it."""
    x, wanted = operation.inputs
    placement = plan.placement(x)
    if _is_reshaped_to_itself(plan, x, wanted):
        plan.put_same(operation, x)
        asked: Any = plan.sizes_of(wanted)
        plan.known_dims[operation.outputs[0].name] = [
            a if d is None and a != -1 else d for d, a in zip(plan.dims(x) or (), asked, strict=True)
        ]
        return
    if not isinstance(placement, Shard):
        whole = plan.replicated(wanted)
        plan.emit(operation, [plan.local(x), whole], placement)
        if isinstance(placement, (Partial, Replicate)):
            _note_dims(plan, operation.outputs[0], wanted)
        return
    found = _reshaped_rows(plan, x, wanted, operation.outputs[0], placement)
    if found is None:
        plan.replicate(operation)
        return
    _note_dims(plan, operation.outputs[0], wanted, found)
    dims, add = plan.known_dims[operation.outputs[0].name], plan.program.add
    if all(
        is_number(d) for axis, d in enumerate(dims) if axis != found.axis
    ):  # A size of -1 cannot be inferred if there are no rows.
        own = plan.as_dtype(plan.elements(found).count, wanted.dtype)
        sizes_ = [own if axis == found.axis else plan.program.constant(d, wanted.dtype) for axis, d in enumerate(dims)]
        plan.emit(operation, [plan.local(x), add("Pack", sizes_, axis=0)], found)
    else:
        plan.emit(operation, [plan.local(x), plan.own_sizes(wanted, found)], found)


def _is_reshaped_to_itself(plan: Planner, x: Any, wanted: Any) -> bool:
    """Returns whether a tensor already has the shape, as where the gradient of a sum is not broadcast."""
    dims, asked = plan.dims(x), plan.sizes_of(wanted)
    if dims is None or asked is None or len(dims) != asked.size:
        return False
    if None not in dims:
        return dims == list(asked)
    others = [(d, a) for d, a in zip(dims, asked, strict=True) if d is not None]
    return len(others) == len(dims) - 1 and all(
        d == a and is_number(d) and d > 0 for d, a in others
    )  # The numbers of elements agree.


def _note_dims(plan: Planner, result: Any, wanted: Any, shard: Shard | None = None) -> None:
    """Records sizes of a result that the trace does not know."""
    dims = _dims_of_result(plan, result, wanted)
    if dims is None:
        return
    if shard is not None and dims[shard.axis] is None:
        dims[shard.axis] = shard.size
    plan.known_dims[result.name] = dims


def _dims_of_result(plan: Planner, result: Any, wanted: Any) -> list[Size] | None:
    """Returns the sizes of a result as far as known, given the tensor with its shape."""
    asked = plan.sizes_of(wanted)
    if asked is None:
        return None if result.shape.rank is None else result.shape.as_list()
    known = [None] * asked.size if result.shape.rank is None else result.shape.as_list()
    dims = [a if d is None and a != -1 else d for d, a in zip(known, asked, strict=True)]
    inferred = [i for i, (d, a) in enumerate(zip(dims, asked, strict=True)) if d is None and a == -1]
    before = plan.dims(result.op.inputs[0]) if inferred else None
    if before is not None:  # The operation is a reshape.
        elements, rest = product(before), product(d for i, d in enumerate(dims) if i not in inferred)
        if None not in (elements, rest) and rest != 0:
            dims[inferred[0]] = _quotient(elements, rest)
    return dims


def _quotient(size: Size, other: Size) -> Size:
    """Returns a size divided by another one; None if that leaves a remainder."""
    if not is_number(size):
        return size // other
    return size // other if is_number(other) and size % other == 0 else None


def _reshaped_rows(plan: Planner, x: Any, wanted: Any, result: Any, shard: Shard) -> Shard | None:
    """Returns the placement of a reshaped tensor; None if its rows cannot stay sharded."""
    before, after = plan.dims(x), _dims_of_result(plan, result, wanted)
    if before is None or after is None:
        return None
    outer, inner = product(before[: shard.axis]), product(before[shard.axis + 1 :])
    if not is_number(outer) and not (isinstance(outer, Rows) and outer.rows == WHOLE):
        return None
    for axis, size_ in enumerate(after):
        if product(after[:axis]) != outer:
            continue
        inner_after = product(after[axis + 1 :])
        per_row = _per_row(shard, inner, inner_after, before[shard.axis], size_, before[shard.axis + 1 :], after[axis + 1 :])
        if per_row is not None:
            return Shard(axis, per_row, shard.rows)
    return None


def _per_row(
    shard: Shard, inner: Size, inner_after: Size, size_before: Size, size_after: Size, behind: Any, behind_after: Any
) -> int | None:
    """Returns the number of elements of the new axis in one row; None if the axis does not hold the rows."""
    if isinstance(size_after, Rows):
        if size_after.rows != shard.rows:
            return None
        same = inner_after == inner and size_after.per_row == shard.per_row
        grown = None not in (inner, inner_after) and inner * shard.per_row == inner_after * size_after.per_row
        unknown_behind = size_after.per_row == shard.per_row and list(behind) == list(behind_after)
        return size_after.per_row if same or grown or unknown_behind or size_after.per_row == shard.per_row else None
    if is_number(inner) and is_number(inner_after) and inner and inner_after:
        elements = shard.per_row * inner
        if elements % inner_after:
            return None
        per_row = elements // inner_after
        if is_number(size_after):
            whole = is_number(size_before) and size_before * inner == size_after * inner_after
            return per_row if whole else None
        return per_row
    if list(behind) == list(behind_after) and (size_after is None or size_after == size_before):
        return shard.per_row
    return None


@rule("Fill", "BroadcastTo")
@always
def grow_to(plan: Planner, operation: Any) -> None:
    """Fills or broadcasts to a replica's own rows if the wanted shape has the rows of the batch."""
    wanted, x = operation.inputs if operation.type == "Fill" else reversed(operation.inputs)
    if isinstance(plan.placement(x), Partial):
        plan.replicated(x)  # Summed before it grows.
    placement, place, sizes_ = plan.placement(x), plan.row_place(wanted), plan.sizes_of(wanted)
    known = plan.rank(x)
    if place is None and sizes_ is not None and known is not None and isinstance(placement, Shard) and placement.rows == OF_LAYOUT:
        along = placement.on(placement.axis + sizes_.size - known)
        place = along if (plan.dims(x) or [])[placement.axis] == sizes_[along.axis] else None
    if place is None or sizes_ is None or known is None:
        _grow_whole(plan, operation, wanted)
        return
    shard = place
    axis = shard.axis - (sizes_.size - known)
    if isinstance(placement, Shard) and placement != shard.on(axis):
        _grow_whole(plan, operation, wanted)
        return
    if isinstance(placement, Shard):
        local = plan.local(x)
    elif axis < 0 or (plan.dims(x) or [])[axis] == 1:
        local = plan.replicated(x)
    elif plan.have_rows(x, shard.on(axis)):
        local = plan.sharded(x, shard.on(axis))
    else:
        _grow_whole(plan, operation, wanted)
        return
    own = plan.own_sizes(wanted, place)
    plan.emit(operation, [own, local] if operation.type == "Fill" else [local, own], shard)
    _note_dims(plan, operation.outputs[0], wanted, shard)


def _grow_whole(plan: Planner, operation: Any, wanted: Any) -> None:
    plan.replicate(operation)
    _note_dims(plan, operation.outputs[0], wanted)


@rule("Empty")
@always
def empty(plan: Planner, operation: Any) -> None:
    """Makes a tensor for a replica's own rows if its shape has the rows of the batch."""
    (wanted,) = operation.inputs
    place = plan.row_place(wanted)
    if place is None:
        plan.replicate(operation)
    else:
        plan.emit(operation, [plan.own_sizes(wanted, place)], place)
    _note_dims(plan, operation.outputs[0], wanted)


@rule("Tile")
@always
def tile(plan: Planner, operation: Any) -> None:
    """Repeats axes other than the row axis. An axis of size 1 may become the row axis."""
    x, times = operation.inputs
    placement, repeated, known = plan.placement(x), plan.sizes_of(times), plan.dims(x)
    if known is None or repeated is None:
        plan.replicate(operation)
        return
    if isinstance(placement, Shard) and repeated[placement.axis] == 1:
        plan.emit(operation, [plan.local(x), plan.replicated(times)], placement)
    elif isinstance(placement, Replicate) and (place := plan.row_place(times)) is not None and known[place.axis] == 1:
        plan.emit(operation, [plan.local(x), plan.own_sizes(times, place)], place)
    else:
        plan.replicate(operation)
    plan.known_dims[operation.outputs[0].name] = [product([a, b]) for a, b in zip(known, repeated, strict=True)]


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(plan: Planner, operation: Any) -> None:
    """Pads axes other than the row axis."""
    x, paddings = operation.inputs[:2]
    placement, known = plan.placement(x), plan.sizes_of(paddings)
    rest = [plan.replicated(t) for t in list(operation.inputs)[1:]]
    if isinstance(placement, Partial) and operation.type in ("Pad", "MirrorPad", "MirrorPadGrad"):
        plan.emit(operation, [plan.local(x), *rest], PARTIAL)
    elif isinstance(placement, Shard) and known is not None and not any(known[placement.axis]):
        plan.emit_filled(operation, [plan.local(x), *rest], [0], placement, placement)
    else:
        plan.replicate(operation)


@rule("EnsureShape")
def ensure_shape(plan: Planner, operation: Any) -> None:
    """Ensures the shape except for the number of rows, which differs on a replica."""
    placement, shape_ = plan.placement(operation.inputs[0]), tf.TensorShape(operation.get_attr("shape"))
    if isinstance(placement, Shard) and shape_.rank is not None:
        shape_ = tf.TensorShape([None if i == placement.axis else d for i, d in enumerate(shape_)])
    plan.emit(operation, plan.locals(operation), placement, shape=shape_)


@rule("ReverseV2", "Roll")
def other_axes(plan: Planner, operation: Any) -> None:
    """Reverses or rolls axes other than the row axis."""
    x = operation.inputs[0]
    axes, placement, known = plan.numbers(operation.inputs[-1]), plan.placement(x), plan.rank(x)
    inputs = [plan.local(x), *(plan.replicated(t) for t in list(operation.inputs)[1:])]
    if isinstance(placement, Partial):
        plan.emit(operation, inputs, PARTIAL)
    elif isinstance(placement, Shard) and axes is not None and known and placement.axis not in [a % known for a in axes]:
        plan.emit(operation, inputs, placement)
    else:
        plan.replicate(operation)


@rule("Split", "SplitV")
def split(plan: Planner, operation: Any) -> None:
    """Splits an axis other than the row axis."""
    place = 1 if operation.type == "Split" else 0
    x, axis = operation.inputs[place], plan.number(operation.inputs[0 if place else 2])
    placement, known = plan.placement(x), plan.rank(x)
    is_other = axis is not None and known and isinstance(placement, Shard) and axis % known != placement.axis
    if not isinstance(placement, Partial) and not is_other:
        plan.replicate(operation)
        return
    inputs = [plan.local(t) if i == place else plan.replicated(t) for i, t in enumerate(operation.inputs)]
    plan.emit(operation, inputs, placement)


@rule("Unpack")
def unpack(plan: Planner, operation: Any) -> None:
    """Splits along an axis into tensors."""
    (x,) = operation.inputs
    placement, known = plan.placement(x), plan.rank(x)
    axis = operation.get_attr("axis") % known if known else None
    if isinstance(placement, Partial):
        plan.emit(operation, [plan.local(x)], PARTIAL)
    elif isinstance(placement, Shard) and axis is not None and axis != placement.axis:
        plan.emit(operation, [plan.local(x)], placement.on(placement.axis - (axis < placement.axis)))
    else:
        plan.replicate(operation)


@rule("Pack", "ConcatV2")
def join(plan: Planner, operation: Any) -> None:
    """Joins tensors along an axis other than the row axis."""
    is_pack = operation.type == "Pack"
    tensors = list(operation.inputs) if is_pack else list(operation.inputs)[:-1]
    rest = [] if is_pack else [plan.replicated(operation.inputs[-1])]
    if operation.outputs[0].dtype == tf.variant:
        plan.replicate(operation)
        return
    placements, known = [plan.placement(x) for x in tensors], operation.outputs[0].shape.rank
    axis = operation.get_attr("axis") if is_pack else plan.number(operation.inputs[-1])
    shards = {p for p in placements if isinstance(p, Shard)}
    if not shards:
        plan.emit(operation, [*map(plan.partial, tensors), *rest], PARTIAL)
        return
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None or known is None or axis is None:
        plan.replicate(operation)
        return
    if not is_pack and axis % known == shard.axis:
        _join_rows(plan, operation, tensors, shard.axis)
        return
    size_ = next(x.shape[shard.axis] for x, p in zip(tensors, placements, strict=True) if p == shard)
    if any(
        p != shard and (isinstance(p, Partial) or not plan.have_rows(x, shard, size_))
        for x, p in zip(tensors, placements, strict=True)
    ):
        plan.replicate(operation)
        return
    placement = shard.on(shard.axis + (is_pack and axis % known <= shard.axis))
    plan.emit(operation, [*(plan.sharded(x, shard) for x in tensors), *rest], placement)


def _join_rows(plan: Planner, operation: Any, tensors: list[Any], axis: int) -> None:
    """Concatenates rows with rows, as of two views of a batch. A replica continues with its part of the result."""
    (result,) = operation.outputs
    size: Size = 0
    for x in tensors:
        dims = plan.dims(x)
        size = None if size is None or dims is None or dims[axis] is None else size + dims[axis]
    if not isinstance(size, Rows):
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.replicated(x) for x in operation.inputs], REPLICATE)
    whole, shard = plan.local(result), size.at(axis)
    plan.put(result, shard, plan.cut(whole, shard, result.shape.rank))
    plan.whole[result.name] = whole
