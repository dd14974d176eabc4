"""Which slices of a sparse gradient are one slice on one device.

Keras's optimizers square each slice of a `tf.IndexedSlices` by itself, so it matters which slices a row has, and not only the sum.
One device has a slice for each row that an example names; those of all replicas then stay beside each other. It has one slice, the
sum over all examples, where the rows do not depend on the batch, or where a lookup asks for each row once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy._tensorflow import body_of_call

_PASSING = frozenset({"Identity", "Reshape", "Cast", "ExpandDims", "Squeeze", "EnsureShape", "Snapshot"})
_DISTINCT = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})


class Kind(enum.Enum):
    """What the slices of all replicas are together.

    Attributes:
        NAMED: Each slice belongs to a row that an example names. One device has the slices of all replicas.
        FIXED: The rows are computed from constants. One device has as many slices as a replica, with the sums of the values.
        ALIKE: The rows are computed from constants, from lengths of sequences, and from variables, which replicas share if their
            parts are of one batch. Then they count as fixed ones do, else as named ones.
        DISTINCT: A replica has one slice for each row (`tf.unique`, as in a product with a sparse matrix), and so has one device.
    """

    NAMED = enum.auto()
    FIXED = enum.auto()
    ALIKE = enum.auto()
    DISTINCT = enum.auto()


class Part(NamedTuple):
    """Some slices of a gradient, all of one kind."""

    slices: tf.IndexedSlices
    kind: Kind


class _Tensor(NamedTuple):
    """A tensor of a `tf.function`, or of a function that it calls.

    Attributes:
        tensor: The tensor.
        calls: The operations that call the functions around it, the innermost last.
    """

    tensor: tf.Tensor
    calls: tuple[Any, ...] = ()

    def causes(self) -> list[_Tensor] | None:
        """Returns the tensors that it is computed from; None if something else decides, such as chance."""
        tensor, calls = self
        if not tf.is_symbolic_tensor(tensor):  # An eager tensor that a function has captured.
            return None if tensor.dtype == tf.resource else []
        op = tensor.op
        body = body_of_call(op)
        if body is not None:
            return [_Tensor(body.outputs[tensor.value_index], (*calls, op))]
        if op.type == "Placeholder" and calls:
            index = next(i for i, given in enumerate(tensor.graph.inputs) if given is tensor)
            return [_Tensor(calls[-1].inputs[index], calls[:-1])]
        if op.type in ("Shape", "Size") and op.inputs[0].shape.is_fully_defined():
            return []
        captured = [outer for outer, inner in getattr(op.graph, "captures", ()) if inner is tensor]
        if not captured and not op.inputs and op.type != "Const" or op.op_def.is_stateful:
            return None
        return [_Tensor(cause, calls) for cause in captured or op.inputs]

    def kind_of_length(self) -> Kind | None:
        """Returns the kind of a size of a dimension that does not count rows; None if it is none."""
        if not tf.is_symbolic_tensor(self.tensor):
            return None
        op = self.tensor.op
        shape = op.inputs[0] if op.inputs else None
        if shape is None or shape.op.type != "Shape" or (sizes := shape.op.inputs[0].shape).rank is None:
            return None
        dimensions = _taken(self.tensor, sizes.rank)
        if dimensions is None or 0 in dimensions:  # The first dimension counts rows.
            return None
        return Kind.ALIKE if any(sizes[i] is None for i in dimensions) else Kind.FIXED

    def reads_variable(self) -> bool:
        """Returns whether it is the value of a variable."""
        return tf.is_symbolic_tensor(self.tensor) and self.tensor.op.type == "ReadVariableOp"

    def source(self) -> _Tensor:
        """Follows it back through operations that keep its elements and their order."""
        here = self
        while tf.is_symbolic_tensor(here.tensor):
            passes = here.tensor.op.type in _PASSING or here.tensor.op.type == "Placeholder" and here.calls
            if not passes and body_of_call(here.tensor.op) is None:
                break
            here = (here.causes() or [here])[0]
        return here

    def lookups(self) -> list[_Tensor]:
        """Returns what it was put together of, by lookups or by a gradient that adds up several."""
        source = self.source()
        is_joined = tf.is_symbolic_tensor(source.tensor) and source.tensor.op.type == "ConcatV2"
        if not is_joined:
            return [source]
        *pieces, _ = source.tensor.op.inputs
        if any(piece.shape.rank != 1 for piece in pieces):
            return [source]
        return [each for piece in pieces for each in _Tensor(piece, source.calls).lookups()]

    def kind(self) -> Kind:
        """Returns the kind of the slices that have these rows."""
        if not tf.is_symbolic_tensor(self.tensor):
            return Kind.NAMED
        if self.tensor.op.type in _DISTINCT:
            return Kind.DISTINCT
        return self._kind_of_causes()

    def _kind_of_causes(self) -> Kind:
        kind, seen, waiting = Kind.FIXED, set(), [self]
        while waiting:
            here = waiting.pop()
            key = here.tensor.ref(), tuple(map(id, here.calls))
            if key in seen:
                continue
            seen.add(key)
            if (of_length := here.kind_of_length()) is not None:
                kind = Kind.ALIKE if of_length is Kind.ALIKE else kind
                continue
            if here.reads_variable():
                kind = Kind.ALIKE
                continue
            causes = here.causes()
            if causes is None:
                return Kind.NAMED
            waiting += causes
        return kind


def _taken(tensor: tf.Tensor, length: int) -> list[int] | None:
    """Returns which elements of a vector an operation takes; None if it does something else, or nobody knows."""
    op = tensor.op
    if op.type == "Unpack":
        return [tensor.value_index]
    if op.type != "StridedSlice":
        return None
    begin, end, stride = (tf.get_static_value(limit) for limit in op.inputs[1:])
    if begin is None or end is None or stride is None or len(begin) != 1:
        return None
    if op.get_attr("shrink_axis_mask"):
        return [range(length)[begin[0]]]
    first = None if op.get_attr("begin_mask") else begin[0]
    return list(range(length)[slice(first, None if op.get_attr("end_mask") else end[0], stride[0])])


def parts_of(gradient: tf.IndexedSlices) -> list[Part]:
    """Divides the slices of a gradient by kind.

    Outside a `tf.function` nothing is known about the rows, and all slices are `Kind.NAMED`.

    Args:
        gradient: The gradient of one replica. A variable that is looked up more than once has the slices of all lookups.

    Returns:
        One part of a kind; of `Kind.DISTINCT` one for each lookup.
    """
    lookups = _Tensor(gradient.indices).lookups()
    kinds = [each.kind() for each in lookups]
    if len(kinds) == 1 or set(kinds) in ({Kind.NAMED}, {Kind.FIXED}, {Kind.ALIKE}):
        return [Part(gradient, kinds[0])]
    sizes = _sizes(gradient.indices, [each.tensor for each in lookups])
    if sizes is None:
        return [Part(gradient, Kind.NAMED)]
    both = zip(tf.split(gradient.values, sizes), tf.split(gradient.indices, sizes), strict=True)
    cut = [tf.IndexedSlices(values, rows, gradient.dense_shape) for values, rows in both]
    parts = [Part(slices, kind) for slices, kind in zip(cut, kinds, strict=True) if kind is Kind.DISTINCT]
    for kind in (Kind.NAMED, Kind.FIXED, Kind.ALIKE):
        if kind in kinds:
            parts.append(Part(joined([slices for slices, each in zip(cut, kinds, strict=True) if each is kind]), kind))
    return parts


def has_fixed_rows(gradient: Any) -> bool:
    """Returns whether a gradient is sparse, and all its slices are of rows that do not depend on the batch."""
    return isinstance(gradient, tf.IndexedSlices) and all(part.kind in (Kind.FIXED, Kind.ALIKE) for part in parts_of(gradient))


def summed_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the slices of each row.

    Example:
        >>> twice = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([5, 3, 5]), tf.constant([6, 1]))
        >>> once = summed_by_row(twice)
        >>> once.indices.numpy().tolist(), once.values.numpy().tolist()
        ([5, 3], [[5.0], [2.0]])
    """
    rows, place = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows)), rows, slices.dense_shape)


def summed_where_alike(gathered: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Adds up the slices of all replicas, the first of each with the first of the others, if all have the same rows.

    Args:
        gathered: The slices of all replicas, in replica order.
        replicas: The number of replicas.

    Returns:
        As many slices as one replica has; `gathered` if the rows of two replicas differ.

    Example:
        >>> of_two = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0], [8.0]]), tf.constant([5, 3, 5, 3]), tf.constant([6, 1]))
        >>> once = summed_where_alike(of_two, 2)
        >>> once.indices.numpy().tolist(), once.values.numpy().tolist()
        ([5, 3], [[5.0], [10.0]])
    """
    values, rows = gathered.values, gathered.indices
    each = tf.size(rows) // replicas
    of_first = tf.tile(rows[:each], [replicas])
    are_alike = tf.reduce_all(tf.equal(rows[: replicas * each], of_first)) & (tf.size(rows) == replicas * each)

    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_sum(tf.reshape(values, tf.concat([[replicas, each], tf.shape(values)[1:]], 0)), 0), rows[:each]

    return tf.IndexedSlices(*tf.cond(are_alike, summed, lambda: (values, rows)), gathered.dense_shape)


def joined(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Puts the slices of parts beside each other."""
    if len(parts) == 1:
        return parts[0]
    values, indices = tf.concat([part.values for part in parts], 0), tf.concat([part.indices for part in parts], 0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _sizes(rows: tf.Tensor, pieces: Sequence[tf.Tensor]) -> list[Any] | None:
    """Returns how many rows each piece has; None where two pieces of open sizes are inside functions."""
    sizes: list[Any] = [piece.shape.num_elements() for piece in pieces]
    for i, piece in enumerate(pieces):
        if sizes[i] is None and piece.graph is rows.graph:
            sizes[i] = tf.size(piece)
    if sizes.count(None) > 1:
        return None
    return [tf.size(rows) - sum(s for s in sizes if s is not None) if size is None else size for size in sizes]
