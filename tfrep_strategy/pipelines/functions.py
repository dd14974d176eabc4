"""What a function of a pipeline does with its rows: whether it may run on a part of them, and give the same result."""

from __future__ import annotations

from collections.abc import Iterator
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


_PYTHON = frozenset({"EagerPyFunc", "PyFunc"})


def first_stateful_operation(function: Any, but_python: bool = False) -> str | None:
    """Returns an operation by which a function's result depends on the calls before it, such as a random number.

    Args:
        function: A concrete function.
        but_python: Whether calls of Python do not count.

    Returns:
        The kind of the first such operation in it, or in a function that it calls; None if there is none.
    """
    for node in _nodes(function):
        known = operation_definition(node.op)  # None: a function, which the library has.
        left_out = _READS_ONLY | _PYTHON if but_python else _READS_ONLY
        if known is not None and known.is_stateful and node.op not in left_out:
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
