"""Whether a function computes each row of its results from that row alone, and to the same bits in a batch of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfrep_strategy.partitioner.rules  # noqa: F401  (registers them)
from tfrep_strategy.errors import CannotPartitionError
from tfrep_strategy.partitioner.placements import REPLICATE, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, in_order
from tfrep_strategy.partitioner.program import Collective, Program
from tfrep_strategy.partitioner.values import OwnRows

_EXACT = frozenset({
    "Abs", "Add", "AddV2", "All", "Any", "ArgMax", "ArgMin", "AsString", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BroadcastTo",
    "Bucketize", "Cast", "Ceil", "ClipByValue", "ConcatV2", "DivNoNan", "Equal", "ExpandDims", "Fill", "Floor", "FloorDiv",
    "FloorMod", "GatherV2", "Greater", "GreaterEqual", "Identity", "IdentityN", "IsFinite", "IsInf", "IsNan", "Less", "LessEqual",
    "LogicalAnd", "LogicalNot", "LogicalOr", "LookupTableFindV2", "Max", "Maximum", "Min", "Minimum", "Mod", "Mul", "Neg",
    "NotEqual", "OneHot", "OnesLike", "Pack", "Placeholder", "Rank", "RealDiv", "RegexFullMatch", "RegexReplace", "Relu", "Relu6",
    "ReverseV2", "Rint", "Roll", "Round", "SelectV2", "Shape", "ShapeN", "Sign", "Size", "Slice", "Split", "SplitV",
    "Square", "SquaredDifference", "Squeeze", "StaticRegexFullMatch", "StaticRegexReplace", "StridedSlice", "StringLength",
    "StringLower", "StringStrip", "StringToHashBucketFast", "StringToNumber", "StringUpper", "Sub", "Tile", "Transpose",
    "TruncateDiv", "Unpack", "ZerosLike",
})  # fmt: skip
"""Operations that move elements, or round each of them alike wherever it stands.

`Exp` and `MatMul`, for example, may round the last rows of an array in another way than the first ones. Sums round by the order in
which they are added up. Pads that reflect fail on no rows.
"""


def operation_that_mixes_rows(function: Any, are_rows: Sequence[bool]) -> str | None:
    """Follows the rows of a batch through a function, by the rules for steps.

    Args:
        function: A concrete function of dense tensors, traced for any number of rows.
        are_rows: Whether each argument has the batch as its first dimension. What else it gets is the same for all batches.

    Returns:
        None if each result has a row for each row of the batch that is computed from that row alone, to the last bit; scalars
        may depend on nothing in the batch. Otherwise the kind of the first operation of which that is not known, or why.
    """
    graph, program = function.graph, Program()
    rows = OwnRows(*(program.argument(tf.int32, []) for _ in range(4)))
    plan = Planner(program, rows, local_replicas=1)
    given = [*are_rows, *[False] * (len(graph.inputs) - len(are_rows))]  # Behind the arguments is what it captures.
    for tensor, is_cut in zip(graph.inputs, given, strict=True):
        plan.put(tensor, Shard(0) if is_cut else REPLICATE, program.argument(tensor.dtype))
    for operation in in_order(graph):
        made = len(program.nodes)
        try:
            plan.plan(operation)
        except CannotPartitionError:
            return str(operation.type)
        if any(isinstance(node, Collective) for node in program.nodes[made:]) or not _is_exact(plan, operation):
            return str(operation.type)
        if any(_rows_are_counted(tensor, plan.placement(tensor)) for tensor in operation.outputs):
            return "a fixed number of rows"
    placements = [plan.placement(tensor) for tensor in graph.outputs]
    if Shard(0) not in placements:
        return "no result has rows"
    if any(each != Shard(0) and tensor.shape.rank != 0 for tensor, each in zip(graph.outputs, placements, strict=True)):
        return "a result that is the same for all rows"
    program.results = [plan.local(tensor) for tensor in graph.outputs]
    return "the number of rows" if any(map(program.uses, (rows.start, rows.total))) else None


def _is_exact(plan: Planner, operation: Any) -> bool:
    tensors = (*operation.inputs, *operation.outputs)
    if all(isinstance(plan.placement(tensor), Replicate) for tensor in tensors):
        return True
    if operation.type == "Reshape":  # Of no rows, no other size can be inferred than their number.
        asked, placement = plan.sizes_of(operation.inputs[1]), plan.placement(operation.outputs[0])
        return asked is not None and isinstance(placement, Shard) and (-1 not in asked or asked[placement.axis] == -1)
    return operation.type in _EXACT


def _rows_are_counted(tensor: Any, placement: Any) -> bool:
    return isinstance(placement, Shard) and tensor.shape.rank is not None and tensor.shape[placement.axis] is not None
