"""Products that sum over common axes, and operations on the last axes of tensors, such as linear algebra and Fourier transforms.

If operands are sharded along an axis that is kept, the result is sharded; along one that is summed, it is partial.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tfrep_strategy.partitioner.placements import OF_LAYOUT, PARTIAL, Partial, Placement, Replicate, Shard, Size, is_number, product
from tfrep_strategy.partitioner.planner import Planner, rule
from tfrep_strategy.partitioner.rules.elementwise import aligned_rows

_CONVOLUTIONS = {"Conv2D": 2, "Conv3D": 3, "DepthwiseConv2dNative": 2}
_TO_PICTURES = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
_TO_FILTER = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
_MATRICES = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")

CONTRACTIONS = frozenset({"MatMul", "Einsum", *_MATRICES, *_CONVOLUTIONS, *_TO_PICTURES, *_TO_FILTER})
"""Operations that sum over common axes."""


def contract(plan: Planner, operation: Any, labels: Sequence[str], result: str, broadcast: str = "") -> None:
    """Plans a product.

    Args:
        plan: The planner.
        operation: The operation. Its first inputs are the operands; others are replicated.
        labels: A letter for each axis of each operand. Axes with the same letter have the same size.
        result: The letters of the result.
        broadcast: The letters of axes that may be broadcast.
    """
    operands, others = list(operation.inputs)[: len(labels)], list(operation.inputs)[len(labels) :]
    _note_dims(plan, operation, operands, labels, result)
    placements = [plan.placement(x) for x in operands]
    summed = [i for i, placement in enumerate(placements) if isinstance(placement, Partial)]
    rest = [plan.replicated(x) for x in others]
    if summed:
        is_linear = len(summed) == 1 and all(isinstance(p, Replicate) for i, p in enumerate(placements) if i not in summed)
        if is_linear and _shrinks(plan, operands[summed[0]], operation.outputs[0]):
            plan.emit(operation, [*map(plan.local, operands), *rest], PARTIAL)
            return
        for i in summed:
            plan.replicated(operands[i])
        placements = [plan.placement(x) for x in operands]
    chosen = _chosen(plan, operands, placements, labels)
    if chosen is None:
        plan.replicate(operation)
        return
    label, rows, size = chosen
    local = []
    for x, axes in zip(operands, labels, strict=True):
        if label not in axes:
            local.append(plan.replicated(x))
            continue
        shard = rows.at(axes.index(label))
        if plan.placement(x) == shard or label not in broadcast or plan.have_rows(x, shard, size):
            local.append(plan.sharded(x, shard))
            continue
        dims = plan.dims(x)
        if dims is None or dims[shard.axis] != 1:
            plan.replicate(operation)
            return
        local.append(plan.replicated(x))
    placement: Placement = rows.at(result.index(label)) if label in result else PARTIAL
    plan.emit(operation, [*local, *rest], placement)


def _note_dims(plan: Planner, operation: Any, operands: Sequence[Any], labels: Sequence[str], result: str) -> None:
    """Records sizes of a product that the trace does not know."""
    sizes: dict[str, Size] = {}
    for x, axes in zip(operands, labels, strict=True):
        sizes |= {label: d for label, d in zip(axes, plan.dims(x) or [None] * len(axes), strict=True) if d is not None and d != 1}
    (tensor,) = operation.outputs
    if tensor.shape.rank is not None:
        known = [sizes.get(axis) if d is None else d for axis, d in zip(result, tensor.shape.as_list(), strict=True)]
        plan.known_dims[tensor.name] = known


def _chosen(plan: Planner, operands: Sequence[Any], placements: Sequence[Placement], labels: Sequence[str]) -> Any:
    """Returns the label of the axis that stays sharded, its rows, and its size in the traced graph.

    If operands are sharded along different axes, as in a contrastive loss, only the largest one stays sharded.
    """
    sharded = []
    for x, placement, axes in zip(operands, placements, labels, strict=True):
        if isinstance(placement, Shard):
            dims = plan.dims(x)
            elements = product(d for i, d in enumerate(dims or [None]) if i != placement.axis)
            known = int(elements) if is_number(elements) else 0
            is_whole_too = x.name in plan.whole
            sharded.append((not is_whole_too, known, (axes[placement.axis], placement.size, x.shape[placement.axis])))
    return max(sharded, key=lambda each: each[:2])[2] if sharded else None


def _shrinks(plan: Planner, operand: Any, result: Any) -> bool:
    before, after = operand.shape.num_elements(), result.shape.num_elements()
    return before is not None and after is not None and after <= before


@rule("MatMul")
def matmul(plan: Planner, operation: Any) -> None:
    """Plans a product of two matrices."""
    first = "km" if operation.get_attr("transpose_a") else "mk"
    second = "nk" if operation.get_attr("transpose_b") else "kn"
    contract(plan, operation, [first, second], "mn")


@rule(*_MATRICES)
def batch_matmul(plan: Planner, operation: Any) -> None:
    """Plans products of matrices whose other axes are broadcast."""
    ranks = [rank for x in operation.inputs if (rank := plan.rank(x)) is not None]
    if len(ranks) < 2:
        plan.replicate(operation)
        return
    batch = string.ascii_lowercase[: max(ranks) - 2]
    first = "KM" if operation.get_attr("adj_x") else "MK"
    second = "NK" if operation.get_attr("adj_y") else "KN"
    labels = [batch[len(batch) - (rank - 2) :] + axes for rank, axes in zip(ranks, (first, second), strict=True)]
    contract(plan, operation, labels, batch + "MN", broadcast="" if operation.type == "BatchMatMul" else batch)


@rule("Einsum")
def einsum(plan: Planner, operation: Any) -> None:
    """Plans an `Einsum` without broadcast axes."""
    operands, result = operation.get_attr("equation").decode().split("->")
    labels = operands.split(",")
    if "." in operands or any(len(set(each)) < len(each) for each in [*labels, result]):
        plan.replicate(operation)
    else:
        contract(plan, operation, labels, result)


def _image_axes(operation: Any, spatial: int) -> tuple[str, str]:
    """Returns the labels of the images before and after a convolution, which sums over the axes of an image."""
    data_format = operation.get_attr("data_format").decode()
    inner, outer = string.ascii_lowercase[:spatial], string.ascii_lowercase[spatial : 2 * spatial]
    if data_format.startswith("NC"):
        return "B" + "C" + inner, "B" + "F" + outer
    return "B" + inner + "C", "B" + outer + "F"


def channel_axis(operation: Any) -> int:
    """Returns the axis of the channels of images; -1 if it is the last one."""
    has_format = "data_format" in operation.node_def.attr
    return 1 if has_format and operation.get_attr("data_format").startswith(b"NC") else -1


def of_layout(plan: Planner, tensor: Any, axis: int) -> Shard | None:
    """Returns the placement of a tensor whose axis is split as layouts split weights: in equal parts, none of them empty."""
    placement, rank = plan.placement(tensor), plan.rank(tensor)
    is_along = isinstance(placement, Shard) and placement.rows == OF_LAYOUT and rank is not None and placement.axis == axis % rank
    return placement if is_along and isinstance(placement, Shard) else None


def _rows_of(plan: Planner, *tensors: Any) -> Shard | None:
    """Returns the rows along which the images of a batch are sharded, if they are."""
    return next((p for p in map(plan.placement, tensors) if isinstance(p, Shard) and p.axis == 0 and p.rows != OF_LAYOUT), None)


def _split_channels(plan: Planner, operation: Any, pictures: Any, weights: Any, results: Any, within: Sequence[Size] | None) -> Any:
    """Finds along which channels a convolution, or a gradient of one, is split.

    Args:
        plan: The planner.
        operation: The operation.
        pictures: The images before the convolution, if they are an operand.
        weights: The filter, if it is an operand.
        results: The images after the convolution, if they are an operand.
        within: The shape of the filter.

    Returns:
        "in" for channels of the images before, or "out" for those of the images after, the shard of an axis, and the rank of all
        tensors; None if it is not split, or if groups of channels have separate filters.
    """
    channels = channel_axis(operation)
    splits = [("out", results, channels), ("in", pictures, channels)]
    if weights is not None:  # It stays sharded; what is sent are images.
        splits = [("out", weights, -1), ("in", weights, -2), *splits]
    found = [(side, shard) for side, x, axis in splits if x is not None and (shard := of_layout(plan, x, axis)) is not None]
    if not found or operation.type.startswith("Depthwise") or within is None:
        return None
    # The images before may have several groups of channels, each as deep as the filter.
    dims = plan.dims(pictures) if pictures is not None else plan.sizes_of(operation.inputs[0])
    before = None if dims is None or len(dims) != len(within) else dims[channels]
    return (*found[0], len(within)) if is_number(before) and before == within[-2] else None


@rule(*_CONVOLUTIONS)
def convolution(plan: Planner, operation: Any) -> None:
    """Plans the convolution of images with a filter. A layout may split it along the channels after, or before, the convolution."""
    pictures, weights = operation.inputs
    placement, channels = plan.placement(pictures), channel_axis(operation)
    if (rows := _rows_of(plan, pictures)) is not None:
        plan.emit_filled(operation, [plan.local(pictures), plan.replicated(weights)], [0], rows, rows)
    elif (split := _split_channels(plan, operation, pictures, weights, None, plan.dims(weights))) is not None:
        side, shard, rank = split
        if side == "out":
            inputs = [plan.replicated(pictures), plan.sharded(weights, shard.on(rank - 1))]
            plan.emit(operation, inputs, shard.on(channels % rank))
        else:
            plan.emit(
                operation, [plan.sharded(pictures, shard.on(channels % rank)), plan.sharded(weights, shard.on(rank - 2))], PARTIAL
            )
    elif isinstance(placement, Shard) or isinstance(plan.placement(weights), Shard):
        plan.replicate(operation)
    else:
        before, after = _image_axes(operation, _CONVOLUTIONS[operation.type])
        contract(plan, operation, [before, "W" * len(weights.shape)], after)


@rule(*_TO_PICTURES)
def convolution_to_pictures(plan: Planner, operation: Any) -> None:
    """Plans the gradient for the images, or a transposed convolution. The first input is the shape of the result."""
    sizes, weights, gradient = operation.inputs
    length, channels = plan.length(sizes), channel_axis(operation)
    rows = _rows_of(plan, gradient)
    if rows is not None and sizes.shape.rank:
        # The shape may lack rows and channels.
        own = plan.replicated(sizes) if length == 2 else plan.own_sizes(sizes, rows, is_filled=True)
        plan.emit_filled(operation, [own, plan.replicated(weights), plan.local(gradient)], [2], rows, rows)
    elif rows is None and (split := _split_channels(plan, operation, None, weights, gradient, plan.dims(weights))) is not None:
        side, shard, rank = split
        if side == "out":
            inputs = [
                plan.replicated(sizes),
                plan.sharded(weights, shard.on(rank - 1)),
                plan.sharded(gradient, shard.on(channels % rank)),
            ]
            plan.emit(operation, inputs, PARTIAL)
        else:
            result = shard.on(channels % rank)
            inputs = [plan.own_sizes(sizes, result), plan.sharded(weights, shard.on(rank - 2)), plan.replicated(gradient)]
            plan.emit(operation, inputs, result)
    else:
        plan.replicate(operation)


@rule(*_TO_FILTER)
def convolution_to_filter(plan: Planner, operation: Any) -> None:
    """Plans the gradient for the filter, which is summed over the images."""
    pictures, sizes, gradient = operation.inputs
    rows, channels = _rows_of(plan, pictures, gradient), channel_axis(operation)
    tensors = (pictures, gradient)
    for x in tensors:
        if isinstance(plan.placement(x), Partial):
            plan.replicated(x)
    if rows is not None:
        inputs = [plan.sharded(pictures, rows), plan.replicated(sizes), plan.sharded(gradient, rows)]
        plan.emit_filled(operation, inputs, [0, 2], rows, PARTIAL)
    elif (split := _split_channels(plan, operation, pictures, None, gradient, plan.sizes_of(sizes))) is not None:
        side, shard, rank = split
        result = shard.on(rank - 1 if side == "out" else rank - 2)
        along = shard.on(channels % rank)
        own = [
            plan.sharded(x, along) if each == side else plan.replicated(x) for x, each in zip(tensors, ("in", "out"), strict=True)
        ]
        plan.emit(operation, [own[0], plan.own_sizes(sizes, result), own[1]], result)
    else:
        plan.replicate(operation)


_INNER = {
    "Cholesky": 2, "Cross": 1, "Eig": 2, "FFT": 1, "FFT2D": 2, "FFT3D": 3, "IFFT": 1, "IFFT2D": 2, "IFFT3D": 3,
    "IRFFT": 1, "IRFFT2D": 2, "LogMatrixDeterminant": 2, "MatrixBandPart": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "MatrixDiagV3": 1, "MatrixInverse": 2, "MatrixSolve": 2, "MatrixTriangularSolve": 2, "Qr": 2,
    "RFFT": 1, "RFFT2D": 2, "SelfAdjointEigV2": 2, "Svd": 2,
}  # fmt: skip
"""The number of last axes that an operation works on."""

_SEVERAL = ("Cross", "MatrixSolve", "MatrixTriangularSolve")
"""Operations with two operands whose other axes are equal or broadcast."""


@rule(*_INNER)
def of_last_axes(plan: Planner, operation: Any) -> None:
    """Keeps rows sharded if the operation does not work on their axis."""
    operands = list(operation.inputs[: 2 if operation.type in _SEVERAL else 1])
    for x in operands:
        if isinstance(plan.placement(x), Partial):
            plan.replicated(x)
    aligned = aligned_rows(plan, operands, have_one_shape=operation.type != "MatrixTriangularSolve")
    rank = max(plan.rank(x) or 0 for x in operands)
    if aligned is None or aligned[0].axis >= rank - _INNER[operation.type]:
        plan.replicate(operation)
        return
    shard, local = aligned
    others = [plan.replicated(x) for x in operation.inputs[len(operands) :]]
    plan.emit(operation, [*local, *others], shard)


@rule("MatrixSetDiagV3")
def set_diagonal(plan: Planner, operation: Any) -> None:
    """Keeps matrices and their diagonals sharded along the same rows."""
    x, diagonal, which = operation.inputs
    shards = {p for p in map(plan.placement, (x, diagonal)) if isinstance(p, Shard)}
    shard, rank = shards.pop() if len(shards) == 1 else None, plan.rank(x)
    if shard is None or rank is None or shard.axis >= rank - 2:
        plan.replicate(operation)
    else:
        plan.emit(operation, [plan.sharded(x, shard), plan.sharded(diagonal, shard), plan.replicated(which)], shard)


@rule("LookupTableFindV2")
def lookup(plan: Planner, operation: Any) -> None:
    """Looks up each element independently, in the table of the process."""
    table, keys, default = operation.inputs
    placement = plan.placement(keys)
    if not isinstance(placement, Shard) or not isinstance(plan.placement(table), Replicate):
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.local(table), plan.local(keys), plan.replicated(default)], placement)
    plan.access(plan.local(table), plan.node_of(operation), writes=False)


@rule("LowerBound", "UpperBound")
def bound(plan: Planner, operation: Any) -> None:
    """Looks up each value in the sorted numbers of its row. If these have one row, the values may be sharded along it."""
    among, values = operation.inputs
    shard = plan.placement(values)
    if shard == Shard(0) and plan.placement(among) == shard:
        plan.emit(operation, plan.locals(operation), shard)
    elif isinstance(shard, Shard) and shard.axis == 1:
        plan.emit(operation, [plan.replicated(among), plan.local(values)], shard)
    else:
        plan.replicate(operation)
    if (dims := plan.dims(values)) is not None:
        plan.known_dims[operation.outputs[0].name] = dims


@rule("DenseBincount")
def counts(plan: Planner, operation: Any) -> None:
    """Counts the elements of each row; for a vector, the elements of all rows."""
    x, size, weights = operation.inputs
    placement, of_weights, rank = plan.placement(x), plan.placement(weights), plan.rank(x)
    is_none = weights.shape.num_elements() == 0
    is_counted = isinstance(placement, Shard) and (is_none or of_weights == placement)
    is_sum = rank == 1 and not operation.get_attr("binary_output")
    if not is_counted or not (is_sum or (rank == 2 and placement == Shard(0))):
        plan.replicate(operation)
        return
    own = plan.replicated(weights) if is_none else plan.local(weights)
    plan.emit(operation, [plan.local(x), plan.replicated(size), own], PARTIAL if is_sum else placement)
