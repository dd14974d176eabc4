"""What a function of a pipeline does with its rows: whether it may run on a part of them, and give the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import operation_definition

_READS_ONLY = frozenset(
    {
        "Assert", "Case", "HashTableV2", "If", "LookupTableExportV2", "LookupTableFindV2", "LookupTableSizeV2", "Placeholder",
        "Print", "PrintV2", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "StatefulPartitionedCall", "VarHandleOp",
        "VarIsInitializedOp", "While",
    }
)  # fmt: skip
"""Operations that TensorFlow calls stateful and that give one result, however often and in whatever order they run.

Functions and branches are among them, since what they contain is looked at by itself.
"""


def first_stateful_operation(function: Any) -> str | None:
    """Returns an operation by which a function's result depends on the calls before it, such as a random number.

    Args:
        function: A concrete function.

    Returns:
        The kind of the first such operation in it, or in a function that it calls; None if there is none.
    """
    for node in _nodes(function):
        known = operation_definition(node.op)  # None: a function, which the library has.
        if known is not None and known.is_stateful and node.op not in _READS_ONLY:
            return str(node.op)
    return None


def resources(function: Any) -> set[int]:
    """Returns the variables, tables and generators that a function uses, as ids that hold while the function exists.

    Args:
        function: A concrete function.
    """
    return {id(tensor) for tensor in function.captured_inputs if tensor.dtype == tf.resource}


def are_alike(function: Any, other: Any) -> bool:
    """Returns whether two functions do the same, but for the sizes of what they are given.

    Args:
        function: A concrete function.
        other: The same Python function, traced for other sizes.

    Returns:
        False as well if that is not known: if they call functions.
    """
    first, second = (each.graph.as_graph_def() for each in (function, other))
    if first.library.function or second.library.function or len(first.node) != len(second.node):
        return False
    captured = zip(function.captured_inputs, other.captured_inputs, strict=False)
    return all(map(_is_alike, first.node, second.node)) and all(own is its for own, its in captured)


def _is_alike(node: Any, other: Any) -> bool:
    if (node.op, list(node.input)) != (other.op, list(other.input)) or set(node.attr) != set(other.attr):
        return False
    return all(value == other.attr[name] for name, value in node.attr.items() if name not in _SIZES)


_SIZES = frozenset({"shape", "_output_shapes"})


def makes_maps(function: Any) -> bool:
    """Returns whether a function of `flat_map` or `interleave` maps elements itself.

    Args:
        function: A concrete function.
    """
    return any(node.op.startswith(("MapDataset", "ParallelMapDataset")) for node in _nodes(function))


def _nodes(function: Any) -> Iterator[Any]:
    """Yields the operations of a function, and of those that it calls."""
    definition = function.graph.as_graph_def()
    yield from definition.node
    for inner in definition.library.function:
        yield from inner.node_def


# Operations that compute every element of the result from the elements at the same place, exactly as for a single row. Others,
# such as `Exp` and `MatMul`, may round the last rows of an array in another way than the first ones.
_BY_ELEMENT = frozenset(
    {
        "Abs", "Add", "AddV2", "AsString", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "ClipByValue", "DivNoNan",
        "Equal", "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Identity", "IdentityN", "IsFinite", "IsInf",
        "IsNan", "Less", "LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "Neg",
        "NotEqual", "OnesLike", "RealDiv", "RegexFullMatch", "RegexReplace", "Relu", "Relu6", "Rint", "Round", "SelectV2", "Sign",
        "Square", "SquaredDifference", "StaticRegexFullMatch", "StaticRegexReplace", "StringLength", "StringLower", "StringStrip",
        "StringToHashBucketFast", "StringToNumber", "StringUpper", "Sub", "TruncateDiv", "ZerosLike",
    }
)  # fmt: skip

def operation_that_mixes_rows(function: Any, are_rows: Sequence[bool]) -> str | None:
    """Follows the rows of a batch through a function.

    Args:
        function: A concrete function of dense tensors, traced for any number of rows.
        are_rows: Whether each argument has the batch as its first dimension. What else it gets is the same for all batches.

    Returns:
        None if each result has a row for each row of the batch that is computed from that row alone, to the last bit; scalars
        may depend on nothing in the batch. Otherwise the kind of the first operation of which that is not known, or why.
    """
    graph = function.graph
    known = {tensor.ref(): rows for tensor, rows in zip(graph.inputs, are_rows, strict=False)}
    for operation in graph.get_operations():
        from_rows = [tensor for tensor in operation.inputs if known.get(tensor.ref(), False)]
        if from_rows and not _keeps_rows(operation, from_rows):
            return str(operation.type)
        for tensor in operation.outputs:
            known.setdefault(tensor.ref(), bool(from_rows))
            if known[tensor.ref()] and tensor.shape.rank and tensor.shape[0] is not None:
                return "a fixed number of rows"
    if not any(known[tensor.ref()] for tensor in graph.outputs):
        return "no result has rows"
    for tensor in graph.outputs:
        if not known[tensor.ref()] and tensor.shape.rank != 0:
            return "a result that is the same for all rows"
    return None


def _keeps_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    """Returns whether each row of an operation's result comes from the row of its inputs that has the same number."""
    if any(not tensor.shape.rank for tensor in from_rows):
        return False
    if operation.type in _BY_ELEMENT:
        return _is_by_element(operation, from_rows)
    rule = _RULES.get(operation.type)
    return rule is not None and rule(operation, from_rows)


def _is_by_element(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    # What has fewer dimensions, or one row, is spread over all rows.
    rank = from_rows[0].shape.rank
    others = [tensor for tensor in operation.inputs if all(tensor is not each for each in from_rows)]
    spread = all(other.shape.rank is not None and (other.shape.rank < rank or other.shape[0] == 1) for other in others)
    return spread and all(tensor.shape.rank == rank for tensor in from_rows)


def _is_input(operation: Any, place: int, from_rows: Sequence[tf.Tensor]) -> bool:
    """Returns whether only the input at that place has rows."""
    return len(from_rows) == 1 and operation.inputs[place] is from_rows[0]


def _constant(tensor: tf.Tensor) -> Any:
    return tf.get_static_value(tensor)


def _gathers(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axis = _constant(operation.inputs[2])
    return _is_input(operation, 1, from_rows) and axis is not None and int(axis) == 0 and operation.get_attr("batch_dims") == 0


def _makes_one_hot(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    return _is_input(operation, 0, from_rows) and operation.get_attr("axis") != 0


def _reduces_within_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axes = _constant(operation.inputs[1])
    rank = from_rows[0].shape.rank
    return _is_input(operation, 0, from_rows) and axes is not None and all(int(axis) % rank != 0 for axis in axes.ravel())


def _adds_dimension(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axis = _constant(operation.inputs[1])
    return _is_input(operation, 0, from_rows) and axis is not None and int(axis) % (from_rows[0].shape.rank + 1) != 0


def _drops_dimensions(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axes = operation.get_attr("squeeze_dims")
    return bool(axes) and all(axis % from_rows[0].shape.rank != 0 for axis in axes)


def _reshapes_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    shape, own = _constant(operation.inputs[1]), from_rows[0].shape[1:]
    if not _is_input(operation, 0, from_rows) or shape is None or not own.is_fully_defined():
        return False
    return len(shape) > 0 and shape[0] == -1 and tf.TensorShape(shape[1:]).num_elements() == own.num_elements()


def _transposes_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    order = _constant(operation.inputs[1])
    return _is_input(operation, 0, from_rows) and order is not None and int(order[0]) == 0


def _joins_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axis = _constant(operation.inputs[-1])
    everything = len(from_rows) == len(operation.inputs) - 1
    return everything and axis is not None and int(axis) % from_rows[0].shape.rank != 0


def _stacks_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    axis = operation.get_attr("axis") % (from_rows[0].shape.rank + 1)
    return len(from_rows) == len(operation.inputs) and axis != 0


def _slices_within_rows(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    strides = _constant(operation.inputs[3])
    if strides is None or not _is_input(operation, 0, from_rows) or (masks["new_axis"] | masks["shrink_axis"]) & 1:
        return False
    if masks["ellipsis"] & 1:  # It stands for the dimensions that the others leave, of which the rows have to be one.
        others = [i for i in range(1, len(strides)) if not masks["new_axis"] >> i & 1]
        return len(others) < from_rows[0].shape.rank
    return bool(masks["begin"] & masks["end"] & 1) and int(strides[0]) == 1


def _looks_up(operation: Any, from_rows: Sequence[tf.Tensor]) -> bool:
    return _is_input(operation, 1, from_rows)


_RULES: dict[str, Callable[[Any, Sequence[tf.Tensor]], bool]] = {
    "ConcatV2": _joins_rows,
    "ExpandDims": _adds_dimension,
    "GatherV2": _gathers,
    "LookupTableFindV2": _looks_up,
    "OneHot": _makes_one_hot,
    "Pack": _stacks_rows,
    "Reshape": _reshapes_rows,
    "Squeeze": _drops_dimensions,
    "StridedSlice": _slices_within_rows,
    "Transpose": _transposes_rows,
    # Sums are missing: they round by the order in which they are added up.
    **dict.fromkeys(("All", "Any", "ArgMax", "ArgMin", "Max", "Min"), _reduces_within_rows),
}
"""Operations for which the dimensions decide."""
