"""Which slices of a sparse gradient are one slice on one device.

Keras's optimizers square each slice of a `tf.IndexedSlices` by itself, so it matters which slices a row has, and not only the sum.
One device has a slice for each row that an example names; those of all replicas then stay beside each other. It has one slice, the
sum over all examples, where the rows do not depend on the batch, or where a lookup asks for each row once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

_PASSING = frozenset({"Identity", "Reshape", "Cast", "ExpandDims", "Squeeze", "EnsureShape", "Snapshot"})
_DISTINCT = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})


class Kind(enum.Enum):
    """What the slices of all replicas are together.

    Attributes:
        NAMED: Each slice belongs to a row that an example names. One device has the slices of all replicas.
        FIXED: The rows are computed from constants only. One device has as many slices as a replica, with the sums of the values.
        DISTINCT: A replica has one slice for each row (`tf.unique`, as in a product with a sparse matrix), and so has one device.
    """

    NAMED = enum.auto()
    FIXED = enum.auto()
    DISTINCT = enum.auto()


class Part(NamedTuple):
    """Some slices of a gradient, all of one kind."""

    slices: tf.IndexedSlices
    kind: Kind


def parts_of(gradient: tf.IndexedSlices) -> list[Part]:
    """Divides the slices of a gradient by kind.

    Outside a `tf.function` nothing is known about the rows, and all slices are `Kind.NAMED`.

    Args:
        gradient: The gradient of one replica. A variable that is looked up more than once has the slices of all lookups.

    Returns:
        One part of a kind; of `Kind.DISTINCT` one for each lookup.
    """
    rows = _rows_of_lookups(gradient.indices)
    kinds = [_kind(each) for each in rows]
    if len(kinds) == 1 or set(kinds) in ({Kind.NAMED}, {Kind.FIXED}):
        return [Part(gradient, kinds[0])]
    values = tf.split(gradient.values, [tf.size(each) for each in rows])
    cut = [tf.IndexedSlices(v, r, gradient.dense_shape) for v, r in zip(values, rows, strict=True)]
    parts = [Part(slices, kind) for slices, kind in zip(cut, kinds, strict=True) if kind is Kind.DISTINCT]
    for kind in (Kind.NAMED, Kind.FIXED):
        if kind in kinds:
            parts.append(Part(joined([slices for slices, each in zip(cut, kinds, strict=True) if each is kind]), kind))
    return parts


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


def _rows_of_lookups(rows: tf.Tensor) -> list[tf.Tensor]:
    """Returns the rows of which others were put together, by lookups or by a gradient that adds up several."""
    source = _source(rows)
    if not tf.is_symbolic_tensor(source) or source.op.type != "ConcatV2":
        return [rows]
    *pieces, _ = source.op.inputs
    if any(piece.shape.rank != 1 for piece in pieces):
        return [rows]
    return [tf.cast(tf.reshape(each, [-1]), rows.dtype) for piece in pieces for each in _rows_of_lookups(piece)]


def _kind(rows: tf.Tensor) -> Kind:
    source = _source(rows)
    if not tf.is_symbolic_tensor(source):
        return Kind.NAMED
    if source.op.type in _DISTINCT:
        return Kind.DISTINCT
    return Kind.FIXED if _is_fixed(source) else Kind.NAMED


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Follows a tensor back through operations that keep its elements and their order."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type in _PASSING:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_fixed(rows: tf.Tensor) -> bool:
    """Returns whether a tensor of a `tf.function` is computed from constants only."""
    seen, waiting = set(), [rows]
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if not tf.is_symbolic_tensor(tensor):  # An eager tensor that a function has captured.
            if tensor.dtype == tf.resource:
                return False
            continue
        op = tensor.op
        if op.type in ("Shape", "Size") and op.inputs[0].shape.is_fully_defined():
            continue
        captured = [outer for outer, inner in getattr(op.graph, "captures", ()) if inner is tensor]
        if not captured and not op.inputs and op.type != "Const" or op.op_def.is_stateful:
            return False
        waiting += captured or op.inputs
    return True
