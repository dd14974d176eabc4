"""Elementwise operations on tensors that broadcast against each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Replicate, Shard, Size, is_number, product
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import SAME_BITS
from tfrep_strategy.partitioner.rules.lists import of_lists

_SAME = ("Identity", "PreventGradient", "Snapshot", "StopGradient")
"""Operations that return their input."""

_LINEAR = ("Conj", "Imag", "Neg", "Real")
"""Linear operations on one operand: a partial operand stays partial."""

_UNARY = (
    "Abs", "Acos", "Acosh", "Angle", "Bitcast", "Asin", "Asinh", "Atan", "Atanh", "BesselI0", "BesselI0e", "BesselI1", "BesselI1e",
    "Ceil",
    "CheckNumerics", "ComplexAbs", "Cos", "Cosh", "Digamma", "Elu", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "Inv",
    "Invert", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Lgamma", "Log", "Log1p", "LogicalNot", "Ndtri", "OnesLike",
    "PopulationCount", "Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Square", "Tan", "Tanh", "ZerosLike", "AsString", "StringLower", "StringUpper",
    "StringStrip", "StringLength", "StringToNumber", "StringToHashBucketFast", "RegexFullMatch", "RegexReplace",
    "StaticRegexFullMatch", "StaticRegexReplace", "Bucketize",
)  # fmt: skip

_BINARY = (
    "Add", "AddV2", "ApproximateEqual", "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Complex", "Div", "DivNoNan",
    "EluGrad", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Igamma", "Igammac", "InvGrad", "LeakyReluGrad",
    "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan",
    "NextAfter", "NotEqual", "Polygamma", "Pow", "RealDiv", "ReciprocalGrad", "Relu6Grad", "ReluGrad", "RightShift",
    "RsqrtGrad", "SeluGrad", "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad", "SquaredDifference", "Sub",
    "TanhGrad", "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "Zeta", "SelectV2", "ClipByValue", "Betainc",
    "AddN",
)  # fmt: skip

SAME_BITS.update((*_SAME, *_LINEAR, *_UNARY, *_BINARY, "Cast"))

_OF_ONE_SHAPE = ("AddN", "ApproximateEqual", *(kind for kind in _BINARY if kind.endswith("Grad")))
"""Operations whose operands are not broadcast."""

_QUANTIZED = [f"FakeQuantWithMinMaxVars{kind}" for kind in ("", "Gradient", "PerChannel", "PerChannelGradient")]

_SUMS = ("Add", "AddV2", "AddN", "Sub")

_PRODUCTS = {
    "Mul": (0, 1), "MulNoNan": (0,), "RealDiv": (0,), "Div": (0,), "DivNoNan": (0,), "ReluGrad": (0,),
    "RsqrtGrad": (1,), "SqrtGrad": (1,), "TanhGrad": (1,), "SigmoidGrad": (1,),
}  # fmt: skip
"""The operands in which an operation is linear if the others are replicated."""


@rule(*_SAME)
@always
def same(plan: Planner, operation: Any) -> None:
    """Passes a tensor on without an operation."""
    (x,) = operation.inputs
    plan.put_same(operation, x)
    if plan.value(x).elements is None:
        _note_dims(plan, operation)


@rule(*_LINEAR)
@always
def linear(plan: Planner, operation: Any) -> None:
    """Plans a linear operation on one operand, which keeps its placement."""
    (x,) = operation.inputs
    plan.emit(operation, plan.locals(operation), plan.placement(x))
    _note_dims(plan, operation)


@rule("IdentityN")
def each(plan: Planner, operation: Any) -> None:
    """Passes each tensor on."""
    plan.emit(operation, plan.locals(operation), *map(plan.placement, operation.inputs))
    for x, result in zip(operation.inputs, operation.outputs, strict=True):
        plan.value(result).elements = plan.value(x).elements


@rule("Cast")
@always
def cast(plan: Planner, operation: Any) -> None:
    """Casts a partial tensor as partial only if no addend can be rounded, or overflow, differently from the sum."""
    (x,) = operation.inputs
    dtype = operation.outputs[0].dtype
    is_exact = x.dtype == dtype or (x.dtype, dtype) == (tf.float32, tf.float64)
    if isinstance(plan.placement(x), Partial) and not is_exact:
        plan.replicate(operation)
    else:
        plan.emit(operation, plan.locals(operation), plan.placement(x))
    _note_dims(plan, operation)


@rule(*_UNARY, *_BINARY)
@always
def elementwise(plan: Planner, operation: Any) -> None:
    """Plans an elementwise operation with broadcast."""
    inputs = list(operation.inputs)
    if operation.outputs[0].dtype == tf.variant:
        of_lists(plan, operation)
        return
    _note_dims(plan, operation)
    if any(isinstance(plan.placement(x), Partial) for x in inputs):
        if _of_sums(plan, operation):
            return
        for x in inputs:
            if isinstance(plan.placement(x), Partial):
                plan.replicated(x)
    aligned = aligned_rows(plan, inputs, operation.type in _OF_ONE_SHAPE)
    if aligned is None:  # Or nothing is sharded.
        plan.replicate(operation)
    else:
        shard, local = aligned
        plan.emit(operation, local, shard)


@rule("Select")
def select(plan: Planner, operation: Any) -> None:
    """Plans a `Select`. The condition has the shape of the operands, or one element for each row, or one in all."""
    condition, *chosen = operation.inputs
    shards = {p for p in map(plan.placement, operation.inputs) if isinstance(p, Shard)}
    shard, rank = shards.pop() if len(shards) == 1 else None, plan.rank(condition)
    if shard is None or rank is None:
        plan.replicate(operation)
        return
    own = plan.sharded(condition, shard) if rank > shard.axis else plan.replicated(condition)
    plan.emit(operation, [own, *(plan.sharded(x, shard) for x in chosen)], shard)


@rule(*_QUANTIZED)
def quantized(plan: Planner, operation: Any) -> None:
    """Plans a quantization in a range for all elements, or in one for each index of the last axis, and its gradients.

    The gradients of a range are sums over elements.
    """
    is_gradient = operation.type.endswith("Gradient")
    *tensors, low, high = operation.inputs
    for x in tensors:
        if isinstance(plan.placement(x), Partial):
            plan.replicated(x)
    aligned, rank = aligned_rows(plan, tensors, have_one_shape=True), plan.rank(tensors[0])
    if aligned is None or (aligned[0].axis + 1 == rank and "PerChannel" in operation.type):
        plan.replicate(operation)
        return
    shard, local = aligned
    inputs = [*local, plan.replicated(low), plan.replicated(high)]
    plan.emit(operation, inputs, *([shard, PARTIAL, PARTIAL] if is_gradient else [shard]))


def _note_dims(plan: Planner, operation: Any) -> None:
    """Records sizes of a result that the trace does not know."""
    shapes = [dims for x in operation.inputs if (dims := plan.dims(x)) is not None]
    if len(shapes) < len(operation.inputs):
        return
    for result in operation.outputs:
        known = [None] * max(map(len, shapes)) if result.shape.rank is None else result.shape.as_list()
        if None in known or result.shape.rank is None:
            plan.known_dims[result.name] = broadcast(shapes, known)


def broadcast(shapes: list[list[Size]], known: list[Size]) -> list[Size]:
    """Returns the broadcast shape, as far as known.

    Example:
        >>> from tfrep_strategy.partitioner.placements import Rows
        >>> broadcast([[Rows(), 1], [4]], [None, 4])
        [Rows(per_row=1, rows=0), 4]
    """
    result = list(known)
    for axis in range(-len(known), 0):
        sizes = {dims[axis] for dims in shapes if len(dims) >= -axis and dims[axis] != 1}
        if result[axis] is None and len(sizes) == 1:
            result[axis] = sizes.pop()
    return result


def _of_sums(plan: Planner, operation: Any) -> bool:
    """Adds an operation that is linear in its partial operands; returns whether it is."""
    inputs = list(operation.inputs)
    placements = [plan.placement(x) for x in inputs]
    summed = [i for i, placement in enumerate(placements) if isinstance(placement, Partial)]
    if operation.type in _SUMS:
        if any(isinstance(placement, Shard) for placement in placements):
            return False
        if not any(_fits(inputs[i], operation) for i in summed):
            return False
        plan.emit(operation, [plan.partial(x) for x in inputs], PARTIAL)
        return True
    if operation.type == "ZerosLike":
        plan.emit(operation, plan.locals(operation), REPLICATE)
        return True
    if operation.type == "SelectV2" and inputs[0].shape.rank == 0 and isinstance(placements[0], Replicate):
        if any(isinstance(placement, Shard) for placement in placements) or len({plan.rank(x) for x in inputs[1:]}) > 1:
            return False
        plan.emit(operation, [plan.local(inputs[0]), *map(plan.partial, inputs[1:])], PARTIAL)
        return True
    is_linear = len(summed) == 1 and summed[0] in _PRODUCTS.get(operation.type, ())
    if not is_linear or not _fits(inputs[summed[0]], operation):
        return False
    if not all(isinstance(placements[i], Replicate) for i in range(len(inputs)) if i not in summed):
        return False
    plan.emit(operation, plan.locals(operation), PARTIAL)
    return True


def _fits(operand: Any, operation: Any) -> bool:
    """Returns whether a result is not larger than an operand. Otherwise the operand is summed before it grows."""
    before, after = operand.shape.num_elements(), operation.outputs[0].shape.num_elements()
    return before == after if before is not None or after is not None else operand.shape.rank == operation.outputs[0].shape.rank


def aligned_rows(plan: Planner, inputs: list[Any], have_one_shape: bool) -> tuple[Shard, list[Any]] | None:
    """Brings broadcast operands to one placement.

    Args:
        plan: The planner.
        inputs: The operands, none of them partial.
        have_one_shape: Whether they are not broadcast.

    Returns:
        The placement of the result, and the local operands; None if the result cannot be sharded, or that is unknown.
    """
    shapes = [dims for x in inputs if (dims := plan.dims(x)) is not None]
    if len(shapes) < len(inputs):
        return None
    rank = max(map(len, shapes))
    sharded = []
    for x, dims in zip(inputs, shapes, strict=True):
        placement = plan.placement(x)
        if isinstance(placement, Shard):
            elements = product(d for axis, d in enumerate(dims) if axis != placement.axis)
            cost = x.name not in plan.whole, elements if is_number(elements) else 0
            sharded.append((cost, placement.on(placement.axis + rank - len(dims)), dims[placement.axis]))
    if not sharded:
        return None
    # When rows are compared with rows, they are on two axes. The largest operand is not sent.
    shard = max(sharded, key=lambda each: each[0])[1]
    size = _first_number(*(of_rows for _, own, of_rows in sharded if own == shard))
    local = []
    for x, dims in zip(inputs, shapes, strict=True):
        axis = shard.axis - (rank - len(dims))
        if axis >= 0 and plan.placement(x) == shard.on(axis):
            if size is not None and is_number(dims[axis]) and dims[axis] != size:
                return None  # One row is broadcast.
            local.append(plan.local(x))
        elif have_one_shape or (axis >= 0 and plan.have_rows(x, shard.on(axis), size)):
            local.append(plan.sharded(x, shard.on(axis)))
        elif axis < 0 or dims[axis] == 1:
            local.append(plan.replicated(x))
        else:
            return None
    return shard, local


def _first_number(*sizes: Any) -> Any:
    return next((size for size in sizes if is_number(size)), None)
