"""Slices, gathers and scatters, and rows that data choose.

If data choose rows, for example by a mask, each replica continues with the chosen ones of its rows. Their number is
known at run time. Replicas gather these numbers when their sum is needed, as for a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Replicate, Rows, Shard
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import Tensor
from tfrep_strategy.partitioner.values import OwnRows


def _chosen(plan: Planner, own: Tensor) -> Rows:
    """Returns new rows. This replica's share of them is the size of the tensor's first axis."""
    add = plan.program.add
    count = add("Slice", add("Shape", own), [0], [1])
    count.shape = tf.TensorShape([1])
    of_all = plan.program.send("gather", count)
    before = add("Slice", of_all, [0], add("Pack", [plan.rows.replica], axis=0))
    start, total = (add("Sum", each, 0, keep_dims=False) for each in (before, of_all))
    return plan.put_rows(OwnRows(start, add("Squeeze", count, squeeze_dims=[0]), total, plan.rows.replica))


@rule("Where")
def where(plan: Planner, operation: Any) -> None:
    """Finds the places where a mask is true among the own rows, counted from the first row of all."""
    (mask,), (places,) = operation.inputs, operation.outputs
    shard, rank = plan.placement(mask), plan.rank(mask)
    if not isinstance(shard, Shard) or shard.axis or rank is None:
        plan.replicate(operation)
        return
    own = plan.program.copy_of(operation, [plan.local(mask)]).outputs[0]
    rows = _chosen(plan, own)
    plan.put(places, rows.at(0), plan.program.add("AddV2", own, _first(plan, shard, places.dtype, rank)))
    plan.known_dims[places.name] = [rows, rank]


@rule("DynamicPartition")
def partition(plan: Planner, operation: Any) -> None:
    """Puts each row into its part. A part is sharded by the replicas that have its rows."""
    data, parts = operation.inputs
    shard = plan.placement(parts)
    if not isinstance(shard, Shard) or shard.axis or plan.placement(data) != shard or parts.shape.rank != 1:
        plan.replicate(operation)
        return
    node = plan.program.copy_of(operation, plan.locals(operation))
    for part, own in zip(operation.outputs, node.outputs, strict=True):
        plan.put(part, _chosen(plan, own).at(0), own)


def chosen_among(plan: Planner, places: Any) -> Shard | None:
    """Returns the placement of the mask that has chosen these places among the own rows; None if no mask has."""
    while places.op.type in ("Cast", "Identity", "Reshape", "Squeeze"):
        places = places.op.inputs[0]
    placement = plan.values[places.name].placement if places.name in plan.values else None
    if places.op.type != "Where" or not isinstance(placement, Shard):
        return None
    among = plan.placement(places.op.inputs[0])
    return among if isinstance(among, Shard) else None


def own_places(plan: Planner, places: Any, among: Shard) -> Tensor:
    """Returns chosen places, relative to the first own row."""
    depth = places.shape[1] if places.shape.rank == 2 else None
    return plan.program.add("Sub", plan.local(places), _first(plan, among, places.dtype, depth))


def _first(plan: Planner, shard: Shard, dtype: tf.DType, depth: int | None) -> Tensor:
    """Returns the place of the first own row, as a number, or as the first element of a vector of length `depth`."""
    start = plan.as_dtype(plan.elements(shard).start, dtype)
    return start if depth is None else plan.vector(depth, 0, 0, start, dtype)


def _axes_of_slice(operation: Any, rank: int, length: int) -> tuple[list[int | None], list[int | None]]:
    """Returns, for each axis of a sliced tensor, its index in the specification, and its axis in the result.

    An index of None means the whole axis. An axis of None means that the axis is removed.
    """

    def has(mask: str, place: int) -> bool:
        return bool(operation.get_attr(mask) >> place & 1)

    named = sum(not has("new_axis_mask", i) and not has("ellipsis_mask", i) for i in range(length))
    places: list[int | None] = []
    axes: list[int | None] = []
    axis = 0
    for place in range(length):
        if has("ellipsis_mask", place):
            for _ in range(rank - named):
                places.append(None)
                axes.append(axis)
                axis += 1
        elif has("new_axis_mask", place):
            axis += 1
        elif has("shrink_axis_mask", place):
            places.append(place)
            axes.append(None)
        else:
            places.append(place)
            axes.append(axis)
            axis += 1
    while len(axes) < rank:
        places.append(None)
        axes.append(axis)
        axis += 1
    return places, axes


def _is_all(plan: Planner, operation: Any, place: int | None, specification: Any, size: Any) -> bool:
    """Returns whether a slice takes all of an axis."""
    if place is None:
        return True
    begin, end, strides = [plan.sizes_of(x) for x in specification]
    starts = operation.get_attr("begin_mask") >> place & 1 or (begin is not None and begin[place] == 0)
    is_end = end is not None and end[place] is not None and end[place] == size
    ends = operation.get_attr("end_mask") >> place & 1 or is_end
    return bool(starts and ends and strides is not None and strides[place] == 1)


def _own_end(plan: Planner, operation: Any, place: int | None, ends: Any, shard: Shard) -> Tensor:
    if place is None or operation.get_attr("end_mask") >> place & 1:
        return plan.replicated(ends)
    return plan.own_sizes(ends, shard.on(place))


@rule("StridedSlice")
@always
def strided_slice(plan: Planner, operation: Any) -> None:
    """Slices all rows, or one, and any part of the other axes."""
    x, begin, end, strides = operation.inputs
    placement, rank, length = plan.placement(x), plan.rank(x), plan.length(begin)
    if isinstance(placement, Partial):
        plan.emit(operation, [plan.local(x), *map(plan.replicated, (begin, end, strides))], PARTIAL)
        return
    if rank is None or length is None:
        plan.replicate(operation)
        return
    places, axes = _axes_of_slice(operation, rank, length)
    if not isinstance(placement, Shard):
        plan.replicate(operation)
        _note_dims(plan, operation, places, axes)
        return
    place, axis = places[placement.axis], axes[placement.axis]
    size = (plan.dims(x) or ())[placement.axis]
    if axis is None:
        _slice_one_row(plan, operation, place, placement)
        return
    if not _is_all(plan, operation, place, (begin, end, strides), size):
        _slice_part(plan, operation, place, axis, size)
        return
    own_end = _own_end(plan, operation, place, end, placement)
    plan.emit(
        operation,
        [plan.local(x), plan.replicated(begin), own_end, plan.replicated(strides)],
        placement.on(axis),
    )


def _note_dims(plan: Planner, operation: Any, places: Sequence[int | None], axes: Sequence[int | None]) -> None:
    """Records sizes of axes that a slice takes completely."""
    x, *specification = operation.inputs
    (result,) = operation.outputs
    dims, known = plan.dims(x), result.shape.as_list() if result.shape.rank is not None else None
    if dims is None or known is None:
        return
    for size, place, axis in zip(dims, places, axes, strict=True):
        if axis is not None and known[axis] is None and _is_all(plan, operation, place, specification, size):
            known[axis] = size
    plan.known_dims[result.name] = known


def _slice_part(plan: Planner, operation: Any, place: int | None, axis: int, size: Any) -> None:
    """Slices some of all rows. If they are the rows of one of two views, say, a replica continues with its own."""
    (result,), (begin, end, strides) = operation.outputs, map(plan.sizes_of, operation.inputs[1:])
    plan.replicate(operation)
    if place is None or begin is None or end is None or strides is None or strides[place] != 1:
        return
    first = 0 if operation.get_attr("begin_mask") >> place & 1 else begin[place]
    last = size if operation.get_attr("end_mask") >> place & 1 else end[place]
    if any(isinstance(x, Rows) and x.rows for x in (first, last, size)):
        return
    before, until, most = (x.per_row if isinstance(x, Rows) else x if x == 0 else None for x in (first, last, size))
    if before is None or until is None or most is None or not before < until <= most or result.shape.rank is None:
        return
    whole, shard = plan.local(result), Shard(axis, until - before)
    plan.put(result, shard, plan.cut(whole, shard, result.shape.rank))
    plan.whole[result.name] = whole


def _slice_one_row(plan: Planner, operation: Any, place: int | None, shard: Shard) -> None:
    """Slices one row, which the replica that has it sends; or replicates all rows."""
    x, begin, end, strides = operation.inputs
    starts, rank, add = plan.numbers(begin), plan.rank(x), plan.program.add
    if place is None or starts is None or rank is None or not operation.get_attr("shrink_axis_mask") >> place & 1:
        plan.replicate(operation)
        return
    first = plan.program.constant(starts[place])
    if starts[place] < 0:
        first = add("AddV2", first, plan.elements(shard).total)
    own, is_here = _own_places(plan, first, shard)
    bounds = [plan.vector(rank, shard.axis, *each) for each in ((0, own), (-1, plan.as_dtype(is_here, tf.int32)))]
    row = add("Slice", plan.local(x), *bounds)
    row.shape = tf.TensorShape([None] * rank)
    of_all = plan.program.send("gather", row, shard.axis)
    starts[place] = 0
    rest = plan.program.constant(starts, begin.dtype), *map(plan.replicated, (end, strides))
    plan.emit(operation, [of_all, *rest], REPLICATE)


def _own_places(plan: Planner, places: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Returns the local index of global places, and whether they are local; for other places, the index after the own rows."""
    add, rows = plan.program.add, plan.elements(shard)
    start, count = (plan.as_dtype(x, places.dtype) for x in (rows.start, rows.count))
    own = add("Sub", places, start)
    is_here = add("LogicalAnd", add("GreaterEqual", own, add("ZerosLike", own)), add("Less", own, count))
    return add("SelectV2", is_here, own, count), is_here


@rule("StridedSliceGrad")
def strided_slice_gradient(plan: Planner, operation: Any) -> None:
    """Puts the gradient of a slice among zeros."""
    shape, begin, end, strides, gradient = operation.inputs
    placement, rank, length = plan.placement(gradient), plan.length(shape), plan.length(begin)
    if isinstance(placement, Partial):
        plan.emit(operation, [*map(plan.replicated, (shape, begin, end, strides)), plan.local(gradient)], PARTIAL)
        return
    if not isinstance(placement, Shard) or rank is None or length is None:
        plan.replicate(operation)
        return
    places, axes = _axes_of_slice(operation, rank, length)
    if placement.axis not in axes:
        plan.replicate(operation)
        return
    before = axes.index(placement.axis)
    sizes = plan.sizes_of(shape)
    size = None if sizes is None else sizes[before]
    holds_rows = size == placement.size or (size is not None and size == gradient.shape[placement.axis])
    if not holds_rows or not _is_all(plan, operation, places[before], (begin, end, strides), size):
        plan.replicate(operation)
        return
    own = [
        plan.own_sizes(shape, placement.on(before)), plan.replicated(begin),
        _own_end(plan, operation, places[before], end, placement), plan.replicated(strides), plan.local(gradient),
    ]  # fmt: skip
    plan.emit(operation, own, placement.on(before))


@rule("Slice")
def slice_(plan: Planner, operation: Any) -> None:
    """Slices all rows, and any part of the other axes."""
    x, begin, size = operation.inputs
    placement, first, count = plan.placement(x), plan.sizes_of(begin), plan.sizes_of(size)
    if isinstance(placement, Partial):
        plan.emit(operation, [plan.local(x), plan.replicated(begin), plan.replicated(size)], PARTIAL)
        return
    if not isinstance(placement, Shard) or first is None or count is None or first[placement.axis] != 0:
        plan.replicate(operation)
        return
    wanted = count[placement.axis]
    if wanted == -1:
        own = plan.replicated(size)
    elif wanted == placement.size or (wanted is not None and wanted == x.shape[placement.axis]):
        own = plan.own_sizes(size, placement)
    else:
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.local(x), plan.replicated(begin), own], placement)


@rule("Range")
@always
def range_(plan: Planner, operation: Any) -> None:
    """Gives all replicas all numbers."""
    plan.replicate(operation)
    start, limit, delta = map(plan.sizes_of, operation.inputs)
    if start == 0 and delta == 1 and limit is not None:
        plan.known_dims[operation.outputs[0].name] = [limit[()]]


@rule("GatherV2", "ResourceGather")
def gather(plan: Planner, operation: Any) -> None:
    """Gathers from a replicated table by sharded indices, or along axes other than the row axis."""
    x, indices = operation.inputs[:2]
    is_variable = operation.type == "ResourceGather"
    axis = 0 if is_variable else plan.number(operation.inputs[2])
    rest = [] if is_variable else [plan.replicated(operation.inputs[2])]
    table, chosen = plan.placement(x), plan.placement(indices)
    if axis is not None and axis < 0:
        rank = plan.rank(x)
        axis = None if rank is None else axis + rank
    if axis is None or operation.get_attr("batch_dims"):
        _gather_rows_by_rows(plan, operation, axis, rest)
        return
    before, places = plan.dims(x), plan.dims(indices)
    if before is not None and places is not None:
        plan.known_dims[operation.outputs[0].name] = [*before[:axis], *places, *before[axis + 1 :]]
    inputs = [plan.local(x), plan.local(indices), *rest]
    among = chosen_among(plan, indices)
    if among is not None and isinstance(chosen, Shard) and axis == 0 and table == among:
        plan.emit(operation, [plan.local(x), own_places(plan, indices, among), *rest], chosen)
    elif isinstance(chosen, Shard) and (isinstance(table, Replicate) or not is_variable):
        whole = plan.local(x) if is_variable else plan.replicated(x)
        plan.emit(operation, [whole, *inputs[1:]], chosen.on(axis + chosen.axis))
    elif isinstance(table, Partial) and isinstance(chosen, Replicate) and not is_variable:
        plan.emit(operation, inputs, PARTIAL)
    elif isinstance(table, Shard) and isinstance(chosen, Replicate) and table.axis != axis and indices.shape.rank is not None:
        plan.emit(operation, inputs, table.on(table.axis + (indices.shape.rank - 1) * (axis < table.axis)))
    elif not isinstance(table, Shard) or is_variable or not _gather_rows(plan, operation, table, rest):
        plan.replicate(operation)
        return
    if is_variable:
        plan.access(plan.local(x), plan.value(operation.outputs[0]).local.node, writes=False)


def _gather_rows(plan: Planner, operation: Any, table: Shard, rest: list[Tensor]) -> bool:
    """Adds a gather along the axis of the rows, by replicated indices; returns whether it is possible."""
    x, indices, axis = operation.inputs
    dims = plan.dims(indices)
    if dims is None:
        return False
    if _are_numbers_of_rows(plan, indices, table):
        plan.put(operation.outputs[0], table, plan.local(x))
        return True
    for place in range(len(dims)):
        shard = table.on(place)
        if plan.have_rows(indices, shard, x.shape[table.axis]):  # A shuffle, say.
            inputs = [plan.replicated(x), plan.sharded(indices, shard), *rest]
            plan.emit(operation, inputs, table.on(table.axis + place))
            return True
    is_sum = x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_complex
    rank = plan.rank(x)
    if rank is None or not is_sum or None in dims:
        return False
    # For some rows: the other rows are zeros, which are behind the own rows.
    own, _ = _own_places(plan, plan.replicated(indices), table)
    zeros = plan.program.constant([[0, int(place == table.axis)] for place in range(rank)])
    with_zeros = plan.program.add("PadV2", plan.local(x), zeros, plan.program.constant(0, x.dtype))
    plan.emit(operation, [with_zeros, own, *rest], PARTIAL)
    return True


def _are_numbers_of_rows(plan: Planner, indices: Any, table: Shard) -> bool:
    """Returns whether indices are the numbers of all rows, in order."""
    operation = indices.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if operation.type != "Range":
        return False
    start, limit, delta = map(plan.sizes_of, operation.inputs)
    return bool(start == 0 and delta == 1 and limit is not None and limit == table.size)


@rule("GatherNd")
def gather_parts(plan: Planner, operation: Any) -> None:
    """Gathers parts of a replicated tensor by sharded indices, or of the rows of parts by replicated indices."""
    x, indices = operation.inputs
    of_parts, chosen, depth = plan.placement(x), plan.placement(indices), indices.shape[-1] if indices.shape.rank else None
    among = chosen_among(plan, indices)
    if depth is None:
        plan.replicate(operation)
    elif among is not None and isinstance(chosen, Shard) and of_parts == among:
        plan.emit(operation, [plan.local(x), own_places(plan, indices, among)], chosen)
    elif isinstance(chosen, Shard) and chosen.axis < indices.shape.rank - 1:
        plan.emit(operation, [plan.replicated(x), plan.local(indices)], chosen)
    elif isinstance(of_parts, Partial) and isinstance(chosen, Replicate):
        plan.emit(operation, plan.locals(operation), PARTIAL)
    elif isinstance(of_parts, Shard) and isinstance(chosen, Replicate) and of_parts.axis >= depth:
        placement = of_parts.on(indices.shape.rank - 1 + of_parts.axis - depth)
        plan.emit_filled(operation, plan.locals(operation), [0], of_parts, placement)
    else:
        plan.replicate(operation)


def _gather_rows_by_rows(plan: Planner, operation: Any, axis: int | None, rest: list[Tensor]) -> None:
    """Gathers in each row by its own indices."""
    x, indices = operation.inputs[:2]
    shard = plan.placement(x)
    is_rows = isinstance(shard, Shard) and shard.axis == 0 and plan.placement(indices) == shard
    if not axis or not is_rows or operation.get_attr("batch_dims") < 1:
        plan.replicate(operation)
    else:
        plan.emit(operation, [plan.local(x), plan.local(indices), *rest], shard)


@rule("OneHot")
def one_hot(plan: Planner, operation: Any) -> None:
    """Adds an axis."""
    placement, axis = plan.placement(operation.inputs[0]), operation.get_attr("axis")
    if not isinstance(placement, Shard) or any(isinstance(plan.placement(x), Partial) for x in list(operation.inputs)[1:]):
        plan.replicate(operation)
        return
    inputs = [plan.local(operation.inputs[0]), *map(plan.replicated, list(operation.inputs)[1:])]
    moved = axis != -1 and axis <= placement.axis
    plan.emit(operation, inputs, placement.on(placement.axis + moved))


@rule("UnsortedSegmentSum")
def segment_sum(plan: Planner, operation: Any) -> None:
    """Sums rows by segment, as for the gradient of a table."""
    data, segments, number = operation.inputs
    placement, own = plan.placement(data), plan.placement(segments)
    among, size = chosen_among(plan, segments), plan.sizes_of(number)
    if among is not None and placement == own and size is not None and size == among.size:  # The gradient of chosen rows.
        count = plan.as_dtype(plan.elements(among).count, number.dtype)
        plan.emit(operation, [plan.local(data), own_places(plan, segments, among), count], among)
        return
    rest = plan.replicated(number)
    are_rows = isinstance(own, Shard) and (placement == own or (isinstance(placement, Replicate) and plan.have_rows(data, own)))
    if isinstance(own, Shard) and are_rows:
        plan.emit(operation, [plan.sharded(data, own), plan.local(segments), rest], PARTIAL)
    elif isinstance(placement, Partial) and isinstance(own, Replicate):
        plan.emit(operation, [plan.local(data), plan.local(segments), rest], PARTIAL)
    elif isinstance(placement, Shard) and isinstance(own, Replicate) and 0 < (segments.shape.rank or 0) <= placement.axis:
        shard = placement.on(placement.axis - segments.shape.rank + 1)
        plan.emit(operation, [plan.local(data), plan.local(segments), rest], shard)
    else:
        plan.replicate(operation)


_EXTREMES = {"UnsortedSegmentMax": "Max", "UnsortedSegmentMin": "Min", "UnsortedSegmentProd": "Prod"}


@rule(*_EXTREMES)
def segment_extremes(plan: Planner, operation: Any) -> None:
    """Reduces segments: the maximum over all rows is the maximum of the replicas' maxima."""
    data, segments, number = operation.inputs
    own, add = plan.placement(segments), plan.program.add
    if not isinstance(own, Shard) or own.axis or plan.placement(data) != own:
        plan.replicate(operation)
        return
    inputs = [plan.local(data), plan.local(segments), plan.replicated(number)]
    of_own = add("ExpandDims", plan.program.copy_of(operation, inputs).outputs[0], 0)
    of_own.shape = tf.TensorShape([1]).concatenate(operation.outputs[0].shape)
    of_all = plan.program.send("gather", of_own)
    plan.put(operation.outputs[0], REPLICATE, add(_EXTREMES[operation.type], of_all, 0, keep_dims=False))


@rule("ScatterNd")
@always
def scatter(plan: Planner, operation: Any) -> None:
    """Puts updates of the own rows among zeros, as addends."""
    indices, updates, shape = operation.inputs
    placement = plan.placement(updates)
    is_own = isinstance(placement, Shard) and placement.axis == 0 and placement == plan.placement(indices)
    among, sizes = chosen_among(plan, indices), plan.sizes_of(shape)
    if among is not None and is_own and sizes is not None and sizes[0] == among.size:  # The gradient of chosen rows.
        plan.emit(operation, [own_places(plan, indices, among), plan.local(updates), plan.own_sizes(shape, among)], among)
        plan.known_dims[operation.outputs[0].name] = list(sizes)
        return
    is_sum = isinstance(placement, Partial) and isinstance(plan.placement(indices), Replicate)
    if is_own or is_sum:
        plan.emit(operation, [plan.local(indices), plan.local(updates), plan.replicated(shape)], PARTIAL)
    else:
        plan.replicate(operation)
    if sizes is not None:
        plan.known_dims[operation.outputs[0].name] = list(sizes)


@rule("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub", "TensorScatterUpdate")
def scatter_into(plan: Planner, operation: Any) -> None:
    """Updates parts of a tensor with rows along a later axis, or adds the own rows to parts of a replicated tensor."""
    x, indices, updates = operation.inputs
    depth, rank, of_updates = indices.shape[-1] if indices.shape.rank else None, plan.rank(x), plan.placement(updates)
    shards = set()
    if depth is not None and rank is not None and isinstance(plan.placement(indices), Replicate):
        further = indices.shape.rank - 1 - depth  # The distance between an axis of the tensor and the axis of the updates.
        if isinstance(own := plan.placement(x), Shard) and own.axis >= depth:
            shards.add(own)
        if isinstance(of_updates, Shard) and of_updates.axis >= indices.shape.rank - 1:
            shards.add(of_updates.on(of_updates.axis - further))
    if len(shards) == 1:
        shard = shards.pop()
        moved = shard.on(shard.axis + further)
        size = x.shape[shard.axis] if plan.placement(x) == shard else updates.shape[moved.axis]
        if plan.have_rows(x, shard, size) and plan.have_rows(updates, moved, size):
            own_updates = plan.filled(plan.sharded(updates, moved), moved, updates)
            plan.emit_filled(operation, [plan.sharded(x, shard), plan.local(indices), own_updates], [0], shard, shard)
            return
    is_own = isinstance(of_updates, Shard) and of_updates.axis == 0 and plan.placement(indices) == of_updates
    if is_own and operation.type in ("TensorScatterAdd", "TensorScatterSub"):
        plan.emit(operation, [plan.partial(x), plan.local(indices), plan.local(updates)], PARTIAL)
    else:
        plan.replicate(operation)


@rule("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate")
def scatter_to_variable(plan: Planner, operation: Any) -> None:
    """Writes rows of a variable. If a layout shards it, each replica writes what it holds of them."""
    handle, indices, new = operation.inputs
    shard, rank, axes = plan.placement(handle), plan.rank(new), plan.rank(indices)
    replaces = operation.type == "ResourceScatterUpdate"
    if not isinstance(shard, Shard) or not rank or axes is None or (shard.axis == 0 and replaces):
        plan.replicate(operation)
        return
    places = plan.replicated(indices)
    if shard.axis:
        values = plan.sharded(new, shard.on(shard.axis + axes - 1))
        plan.add_write(operation, [plan.local(handle), places, values])
        return
    add = plan.program.add
    own, is_here = _own_places(plan, places, shard)
    last = plan.as_dtype(add("Sub", plan.elements(shard).count, 1), indices.dtype)
    for _ in range(rank - axes):
        is_here = add("ExpandDims", is_here, -1)
    values = add("SelectV2", is_here, plan.replicated(new), plan.program.constant(0, new.dtype))  # Zeros for the rows of others.
    plan.add_write(operation, [plan.local(handle), add("Minimum", own, last), values])
