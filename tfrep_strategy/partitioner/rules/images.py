"""Operations that treat each image of a batch independently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfrep_strategy.partitioner.placements import PARTIAL, Partial, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.rules.contractions import channel_axis, of_layout

_PICTURES = {
    "MaxPool": (0,), "MaxPool3D": (0,), "AvgPool": (0,), "AvgPool3D": (0,),
    "MaxPoolGrad": (0, 1, 2), "MaxPool3DGrad": (0, 1, 2),
    "LRN": (0,), "LRNGrad": (0, 1, 2),
    "ResizeBilinear": (0,), "ResizeNearestNeighbor": (0,), "ResizeBicubic": (0,), "ResizeArea": (0,), "ScaleAndTranslate": (0,),
    "ResizeBilinearGrad": (0, 1), "ResizeBicubicGrad": (0, 1), "ResizeNearestNeighborGrad": (0,),
    "RGBToHSV": (0,), "HSVToRGB": (0,), "AdjustContrastv2": (0,), "AdjustSaturation": (0,), "AdjustHue": (0,),
    "DepthToSpace": (0,), "SpaceToDepth": (0,), "ExtractImagePatches": (0,), "ExtractVolumePatches": (0,),
    "Dilation2D": (0,), "ImageProjectiveTransformV3": (0, 1),
}  # fmt: skip
"""The indices of inputs with images, one a row. Other inputs are equal for all images."""

_BY_CHANNELS = frozenset({
    "MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D", "MaxPoolGrad", "MaxPool3DGrad", "ResizeBilinear", "ResizeNearestNeighbor",
    "ResizeBicubic", "ResizeArea", "ScaleAndTranslate", "ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad",
})  # fmt: skip
"""Operations that treat each channel of an image independently."""


@rule(*_PICTURES)
def each_picture(plan: Planner, operation: Any) -> None:
    """Plans an operation on independent images."""
    places = _PICTURES[operation.type]
    if (shard := _by_channels(plan, operation, places)) is not None:
        inputs = [plan.sharded(x, shard) if i in places else plan.replicated(x) for i, x in enumerate(operation.inputs)]
        plan.emit(operation, inputs, shard)
        return
    shards = {p for i in places if isinstance(p := plan.placement(operation.inputs[i]), Shard)}
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None or shard.axis or not _own_axes(plan, operation):
        plan.replicate(operation)
        return
    size = next(operation.inputs[i].shape[0] for i in places if plan.placement(operation.inputs[i]) == shard)
    inputs, with_rows = [], []
    for i, x in enumerate(operation.inputs):
        dims = plan.dims(x)
        is_rows = plan.placement(x) == shard or (i in places and plan.have_rows(x, shard, size))
        if is_rows and not isinstance(plan.placement(x), Partial):
            inputs.append(plan.sharded(x, shard))
            with_rows.append(i)
        elif i not in places or (dims is not None and dims[0] == 1):  # Equal for all images, or broadcast.
            inputs.append(plan.replicated(x))
        else:
            plan.replicate(operation)
            return
    plan.emit_filled(operation, inputs, with_rows, shard, shard)


def _by_channels(plan: Planner, operation: Any, places: Sequence[int]) -> Shard | None:
    """Returns the placement of images whose channels a layout shards, if an operation keeps it."""
    channels = channel_axis(operation)
    windows = [operation.get_attr(name)[channels] for name in ("ksize", "strides") if name in operation.node_def.attr]
    if operation.type not in {*_BY_CHANNELS, "AvgPoolGrad", "AvgPool3DGrad"} or any(size != 1 for size in windows):
        return None
    placements = [plan.placement(operation.inputs[i]) for i in places]
    shard = next((p for i in places if (p := of_layout(plan, operation.inputs[i], channels)) is not None), None)
    return shard if all(p == shard or isinstance(p, Replicate) for p in placements) else None


def _own_axes(plan: Planner, operation: Any) -> int:
    """Returns the number of axes before those that an operation works on."""
    rank = plan.rank(operation.inputs[0])
    if operation.type in ("RGBToHSV", "HSVToRGB", "AdjustContrastv2", "AdjustSaturation", "AdjustHue"):
        return 0 if rank is None else rank - (3 if operation.type == "AdjustContrastv2" else 1)
    return 1


@rule("AvgPoolGrad", "AvgPool3DGrad")
def average_pool_gradient(plan: Planner, operation: Any) -> None:
    """Plans the gradient of average pooling. The first input is the shape of the images."""
    sizes, gradient = operation.inputs
    placement = plan.placement(gradient)
    if (shard := _by_channels(plan, operation, [1])) is not None:
        plan.emit(operation, [plan.own_sizes(sizes, shard), plan.local(gradient)], shard)
    elif not isinstance(placement, Shard) or placement.axis:
        plan.replicate(operation)
    else:
        own = plan.own_sizes(sizes, placement, is_filled=True)
        plan.emit_filled(operation, [own, plan.local(gradient)], [1], placement, placement)


@rule("BiasAdd")
@always
def bias_add(plan: Planner, operation: Any) -> None:
    """Plans the addition of a bias, which has the axis of the channels."""
    x, bias = operation.inputs
    placement, rank = plan.placement(x), plan.rank(x)
    channels = 1 if operation.get_attr("data_format") == b"NCHW" else -1
    if (dims := plan.dims(x)) is not None:
        plan.known_dims[operation.outputs[0].name] = dims
    if isinstance(placement, Shard) and rank is not None and placement.axis != channels % rank:
        plan.emit(operation, [plan.local(x), plan.replicated(bias)], placement)
    elif isinstance(placement, Shard) and rank is not None and plan.have_rows(bias, placement.on(0), x.shape[placement.axis]):
        plan.emit(operation, [plan.local(x), plan.sharded(bias, placement.on(0))], placement)
    elif isinstance(placement, Partial) or isinstance(plan.placement(bias), Partial):
        if isinstance(placement, Shard):
            plan.replicate(operation)
        else:
            plan.emit(operation, [plan.partial(x), plan.partial(bias)], PARTIAL)
    else:
        plan.replicate(operation)
