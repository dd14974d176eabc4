"""Properties of pipeline functions: whether they may run on a part of the rows, and whether their calls may run in parallel.

Maps that draw random numbers or have other effects are called sequentially, so that all processes get the same elements.
TensorFlow gives the numbers of one generator to the calls of a map in any order. With several calls at once (`num_parallel_calls`)
each process would give an example other numbers. Sequential calls draw the numbers of `num_parallel_calls=None`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

import tfrep_strategy.partitioner.rules  # noqa: F401  (registers the rules)
from tfrep_strategy.core.tf import dataset_kinds as kinds
from tfrep_strategy.core.tf import is_none, operation_definition, parts_of_dataset
from tfrep_strategy.data.batches import any_size
from tfrep_strategy.errors import CannotPartitionError
from tfrep_strategy.partitioner.placements import REPLICATE, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, in_order
from tfrep_strategy.partitioner.program import Collective, Program
from tfrep_strategy.partitioner.values import OwnRows

_READS_ONLY = frozenset(
    {
        "Assert", "Case", "HashTableV2", "If", "LookupTableExportV2", "LookupTableFindV2", "LookupTableSizeV2", "Placeholder",
        "Print", "PrintV2", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "StatefulPartitionedCall", "VarHandleOp",
        "VarIsInitializedOp", "While",
    }
)  # fmt: skip
"""Operations that TensorFlow calls stateful, but whose result does not depend on the number or order of their runs.

Functions and branches are among them, because their contents are checked separately.
"""


_PYTHON = frozenset({"EagerPyFunc", "PyFunc"})


def first_stateful_operation(function: Any, but_python: bool = False) -> str | None:
    """Returns an operation that makes a function's result depend on earlier calls, such as a random number.

    Args:
        function: A concrete function.
        but_python: Whether to ignore calls of Python.

    Returns:
        The kind of the first such operation in it, or in a function that it calls; None if there is none.
    """
    for node in _nodes(function):
        known = operation_definition(node.op)  # None for a function, which is in the library.
        left_out = _READS_ONLY | _PYTHON if but_python else _READS_ONLY
        if known is not None and known.is_stateful and node.op not in left_out:
            return str(node.op)
    return None


def resources(function: Any) -> set[int]:
    """Returns the variables, tables and generators of a function, as ids that are valid while the function exists.

    Args:
        function: A concrete function.
    """
    return {id(tensor) for tensor in function.captured_inputs if tensor.dtype == tf.resource}


def are_alike(function: Any, other: Any) -> bool:
    """Returns whether two functions are equal except for the sizes of their arguments.

    Args:
        function: A concrete function.
        other: The same Python function, traced for other sizes.

    Returns:
        True if they are equal. False also if that is unknown, because they call functions.
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
    """Yields the operations of a function, and of the functions that it calls."""
    definition = function.graph.as_graph_def()
    yield from definition.node
    for inner in definition.library.function:
        yield from inner.node_def


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
"""Operations that move elements, or round each element the same way wherever it is.

`Exp` and `MatMul`, for example, may round the last rows of an array differently from the first ones. Sums round by the order of
the terms. Pads that reflect fail without rows.
"""


def operation_that_mixes_rows(function: Any, are_rows: Sequence[bool]) -> str | None:
    """Tracks the rows of a batch through a function, by the rules for steps.

    Args:
        function: A concrete function of dense tensors, traced for any number of rows.
        are_rows: Whether each argument has the batch as its first dimension. Other arguments are equal for all batches.

    Returns:
        None if each row of each result depends only on the same row of the batch, to the last bit, and scalar results do not
        depend on the batch. Otherwise the type of the first operation that violates this, or may, or another reason.
    """
    graph, program = function.graph, Program()
    rows = OwnRows(*(program.argument(tf.int32, []) for _ in range(4)))
    plan = Planner(program, rows, local_replicas=1)
    given = [*are_rows, *[False] * (len(graph.inputs) - len(are_rows))]  # Captured tensors follow the arguments.
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
    if operation.type == "Reshape":  # Without rows, only their number can be inferred.
        asked, placement = plan.sizes_of(operation.inputs[1]), plan.placement(operation.outputs[0])
        return asked is not None and isinstance(placement, Shard) and (-1 not in asked or asked[placement.axis] == -1)
    return operation.type in _EXACT


def _rows_are_counted(tensor: Any, placement: Any) -> bool:
    return isinstance(placement, Shard) and tensor.shape.rank is not None and tensor.shape[placement.axis] is not None


COUNTING = (kinds.Take, kinds.Skip, kinds.Repeat)
"""Operations that depend only on the number of elements."""

_IN_ORDER = (kinds.Options, kinds.Prefetch, *COUNTING)
_SAME_ELEMENTS = (*_IN_ORDER, kinds.Cache, kinds.Shuffle)
"""Operations that pass on the elements below, in the same or another order."""


def of_any_size(dataset: Any) -> tuple[Any, str | None]:
    """Returns a map of batches in a form that runs on a part of their rows, or the reason why it needs whole batches.

    Args:
        dataset: A data set that maps batches. Zipped elements that repeat forever are not batches: each part gets them whole.

    Returns:
        The same map, traced for any number of rows, and None; or None, and an operation that may mix rows or another reason.
    """
    if not hasattr(dataset, "_of_any_size"):  # Tracing the user's function again takes time.
        dataset._of_any_size = _found_of_any_size(dataset)
    found: tuple[Any, str | None] = dataset._of_any_size
    return found


def _found_of_any_size(dataset: Any) -> tuple[Any, str | None]:
    function, below = dataset._map_func.function, _side_by_side(dataset._input_dataset)
    found = first_stateful_operation(function) or changed_below(dataset)
    if found is not None:
        return None, found
    for spec in tf.nest.flatten((dataset._input_dataset.element_spec, dataset.element_spec)):
        if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.variant or spec.shape.rank is None:
            return None, "sparse or ragged values, or an unknown number of dimensions"
    unsized = dataset if all(map(_has_any_size, below)) else _unsized(dataset, below)
    if unsized is None:
        return None, "it knows the size of its batches"
    given = [(leaf, leaf.shape.rank != 0 and not is_same_in_every_step(part)) for part in below for leaf in _leaves(part)]
    sizes = [leaf.shape[0] for leaf, is_cut in given if is_cut]
    if len(set(sizes)) > 1 or len(sizes) > 1 and sizes[0] is None and _rows_of(dataset._input_dataset) is None:
        return None, "tensors that may have different numbers of rows"
    mixing = operation_that_mixes_rows(unsized._map_func.function, [is_cut for _, is_cut in given])
    return (unsized, None) if mixing is None else (None, mixing)


def _unsized(dataset: Any, below: list[Any]) -> Any:
    """Traces a map of batches of one size for any size; returns None if that changes the function."""

    def unsized(part: Any) -> Any:
        variant = tf.data.experimental.to_variant(part)
        return part if _has_any_size(part) else tf.data.experimental.from_variant(variant, any_size(part.element_spec))

    parts, zipped = list(map(unsized, below)), dataset._input_dataset
    source = tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped._datasets, parts)) if isinstance(zipped, kinds.Zip) else parts[0]
    try:
        again = source.map(dataset._map_func._func)
    except Exception:  # The user's function may raise anything when it does not get the expected size.
        return None
    return again if are_alike(dataset._map_func.function, again._map_func.function) else None


def _rows_of(dataset: Any) -> Any:
    """Returns the properties that determine the number of rows of all tensors of a batch; None if they are unknown."""
    if isinstance(dataset, (kinds.Batch, kinds.ParallelBatch)):
        drops = bool(dataset._drop_remainder)
        return int(dataset._batch_size), None if drops else int(dataset._input_dataset.cardinality())
    if isinstance(dataset, _IN_ORDER):
        return _rows_of(dataset._input_dataset)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return _rows_of(dataset._input_dataset) if of_any_size(dataset)[1] is None else None
    if isinstance(dataset, kinds.Zip):
        return _common_rows([part for part in dataset._inputs() if not is_same_in_every_step(part)])
    return None


def _common_rows(datasets: Sequence[Any]) -> Any:
    """Returns the properties that determine the number of rows of several data sets, if they are known and equal."""
    found = {_rows_of(dataset) for dataset in datasets}
    rows = found.pop() if len(found) == 1 else None
    return None if rows is None or rows[1] == tf.data.UNKNOWN_CARDINALITY else rows


def parts_fit(dataset: Any, num_parts: int) -> bool:
    """Returns whether each tensor of a batch may be cut by its own rows, as far as the pipeline shows.

    This holds if all have the same number of rows, or if they were batched separately (labeled and unlabeled examples, say) and the
    parts of each are equally large.
    """
    if len(_leaves(dataset)) == 1 or _has_known_rows(dataset.element_spec):
        return True
    if isinstance(dataset, _SAME_ELEMENTS):
        return parts_fit(dataset._input_dataset, num_parts)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return of_any_size(dataset)[1] is None
    if isinstance(dataset, kinds.Zip):
        parts = list(filter(has_rows, dataset._inputs()))
        together = len(parts) < 2 or _common_rows(parts) is not None or all(_divides(part, num_parts) for part in parts)
        return together and all(parts_fit(part, num_parts) for part in parts)
    return isinstance(dataset, (kinds.Batch, kinds.PaddedBatch, kinds.ParallelBatch))


def rows_are_alike(dataset: Any) -> bool:
    """Returns whether all tensors of a batch, except scalars, have the same number of rows, as far as the pipeline shows."""
    if sum(not is_none(leaf) and leaf.shape.rank != 0 for leaf in _leaves(dataset)) == 1 or _has_known_rows(dataset.element_spec):
        return True
    if isinstance(dataset, _SAME_ELEMENTS):
        return rows_are_alike(dataset._input_dataset)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return of_any_size(dataset)[1] is None
    if isinstance(dataset, kinds.Zip):
        return _common_rows(dataset._inputs()) is not None and all(map(rows_are_alike, dataset._inputs()))
    return isinstance(dataset, (kinds.Batch, kinds.PaddedBatch, kinds.ParallelBatch))


def _has_known_rows(spec: Any) -> bool:
    """Returns whether all tensors have the same number of rows in each batch."""
    leaves = tf.nest.flatten(spec)
    rows = {leaf.shape[0] if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank else None for leaf in leaves}
    return len(rows) == 1 and None not in rows


def _divides(dataset: Any, num_parts: int) -> bool:
    """Returns whether all batches of a data set are known to have equally large parts."""
    size, rows = _rows_of(dataset) or (1, None)
    last = 0 if rows in (None, tf.data.INFINITE_CARDINALITY) else rows % size
    return rows != tf.data.UNKNOWN_CARDINALITY and size % num_parts == last % num_parts == 0


def _has_any_size(dataset: Any) -> bool:
    return is_same_in_every_step(dataset) or dataset.element_spec == any_size(dataset.element_spec)


def _side_by_side(dataset: Any) -> list[Any]:
    return list(dataset._inputs()) if isinstance(dataset, kinds.Zip) else [dataset]


def _leaves(dataset: Any) -> list[Any]:
    return tf.nest.flatten(dataset.element_spec)


def changed_below(dataset: Any) -> str | None:
    """Returns an operation below a map that changes state that the map reads: its lead must not depend on the cut."""
    used = resources(dataset._map_func.function)
    below = [each.function for part in parts_of_dataset(dataset._input_dataset) for each in part._functions()] if used else []
    return next((found for each in below if used & resources(each) and (found := first_stateful_operation(each))), None)


def has_rows(dataset: tf.data.Dataset) -> bool:
    """Returns whether the batches of a data set have a tensor that is not a scalar."""
    shapes = [getattr(leaf, "shape", None) for leaf in _leaves(dataset)]
    return any(shape is not None and shape.rank != 0 for shape in shapes)


def is_same_in_every_step(dataset: Any) -> bool:
    """Returns whether a data set repeats one element, so that it is equal in every step."""
    return isinstance(dataset, kinds.Repeat) and isinstance(dataset._input_dataset, kinds.Tensor)


_REWRITES = "make_deterministic"
"""The rewrite that TensorFlow uses for this under `enable_op_determinism`. Maps without state stay parallel."""


class _OneAtATime(kinds.Unchanged):
    """A data set whose maps are called sequentially if they have state.

    Args:
        dataset: A data set of any kind.
    """

    def __init__(self, dataset: Any) -> None:
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            optimizations_enabled=[_REWRITES],
            optimizations_disabled=tf.constant([], tf.string),
            optimizations_default=tf.constant([], tf.string),
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


def alike_on_all_processes(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set with the same elements on all processes, even if it draws random numbers in parallel calls.

    Calls of Python are left unchanged, because it is unknown whether they depend on each other.

    Args:
        dataset: A data set that each process has.

    Example:
        >>> data = tf.data.Dataset.range(3).map(lambda i: i + 1, num_parallel_calls=2)
        >>> alike_on_all_processes(data) is data
        True
    """
    return _OneAtATime(dataset) if any(map(_has_state_in_parallel, parts_of_dataset(dataset))) else dataset


def _has_state_in_parallel(part: Any) -> bool:
    """Returns whether calls of a function with state may run in parallel."""
    return isinstance(part, (kinds.ParallelMap, kinds.ParallelInterleave)) and any(
        first_stateful_operation(each.function, but_python=True) for each in part._functions()
    )
