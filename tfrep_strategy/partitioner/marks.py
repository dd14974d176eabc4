"""Marks on operations of a traced step, which tell the partitioner what replicas do there. On one device they do nothing.

A mark is an attribute of an operation. Its rule is in `rules/effects.py`. Some marks give each replica its own value (`Own`).
Computations with such values are per replica, until they become a whole tensor or a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import set_mark

NAME = "_tfrep_mark"

GRADIENT, SLICES, REPLICA, OWN_ROW, ALL_ROWS, ADDEND, OWN_SUM, SPREAD, CALL, BATCH, WITHIN = (
    "gradient", "slices", "replica", "own row", "all rows", "addend", "own sum", "spread", "call", "batch", "within",
)  # fmt: skip
MARKED = frozenset({"BroadcastTo", "ConcatV2", "EagerPyFunc", "GatherV2", "Identity", "IdentityN", "Pack"})
"""The types of operations that may have a mark."""

APPLIED = "_tfrep_applied"
"""The collection of a graph that has the gradients which optimizers are given."""

Called = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Marks a gradient. If replicas hold addends, they are reduced like gradients."""
    return _marked(GRADIENT, tf.identity(tensor))


def note_applied(gradients: Sequence[Any]) -> None:
    """Notes the gradients that an optimizer is given, dense and sparse ones.

    Args:
        gradients: `tf.Tensor`, `tf.IndexedSlices` or None.
    """
    for part in filter(tf.is_symbolic_tensor, tf.nest.flatten(list(gradients), expand_composites=True)):
        part.graph.add_to_collection(APPLIED, part)


def slices(tensor: tf.Tensor) -> tf.Tensor:
    """Marks the values of a sparse gradient. If replicas hold rows, they are gathered as gradients are."""
    return _marked(SLICES, tf.identity(tensor))


def replica() -> tf.Tensor:
    """Returns the replica id, an int32 scalar that differs between replicas."""
    return _marked(REPLICA, tf.identity(tf.constant(0)))


def own_row(rows: tf.Tensor) -> tf.Tensor:
    """Returns each replica's row, of shape `[width]`, of a gradient of shape `[replicas, width]`."""
    return _marked(OWN_ROW, tf.raw_ops.GatherV2(params=rows, indices=0, axis=0))


def all_rows(row: tf.Tensor, replicas: int) -> tf.Tensor:
    """Returns the rows of all replicas, of shape `[replicas, width]`, given the row of each replica."""
    return _marked(ALL_ROWS, tf.raw_ops.BroadcastTo(input=row, shape=[replicas, *row.shape]))


def addend(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the replicas of their own values."""
    return _marked(ADDEND, tf.identity(tensor))


def own_sum(rows: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns, on each replica, the sum of its rows over axes, which stay with size 1.

    Args:
        rows: The rows; the first axis is the batch axis.
        axes: That axis, and others.
    """

    @tf.custom_gradient
    def summed(rows: tf.Tensor) -> Any:
        own = _marked(OWN_SUM, tf.identity(tf.reduce_sum(rows, axes, keepdims=True)))
        return own, lambda gradient: tf.broadcast_to(spread(gradient, rows), tf.shape(rows))

    return summed(rows)


def spread(own: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Repeats a replica's value for each of its rows.

    Args:
        own: The value of each replica; its first axis has size 1.
        rows: A tensor with the rows.
    """

    @tf.custom_gradient
    def spread_out(own: tf.Tensor) -> Any:
        shape = tf.concat([tf.shape(rows)[:1], own.shape[1:]], 0)
        return _marked(SPREAD, tf.raw_ops.BroadcastTo(input=own, shape=shape)), lambda gradient: own_sum(gradient, [0])

    return spread_out(own)


def batch(tensors: Sequence[tf.Tensor], replicas: int) -> list[tf.Tensor]:
    """Marks tensors as a batch that is sharded over the replicas from here on, in the body of a loop or a branch.

    Args:
        tensors: Tensors with equally many rows.
        replicas: Number of replicas.
    """
    _, *marked = tf.raw_ops.IdentityN(input=[tf.constant(replicas), *tensors])
    _marked(BATCH, marked[0])
    return list(marked)


def called(function: Called, tensors: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Returns the results of a function. Each replica calls it with its addends and rows, and all get the same results.

    Args:
        function: Takes and returns tensors.
        tensors: The arguments.
        results: The specifications of the results.
    """
    shapes = [each.shape for each in results]
    made = tf.raw_ops.EagerPyFunc(input=list(tensors), token="", Tout=[each.dtype for each in results])
    for tensor, shape in zip(made, shapes, strict=True):
        tensor.set_shape(shape)
    _marked(CALL, made[0])
    operation = made[0].op
    operation.graph.add_to_collection(_collection(operation), function)
    return list(made)


def function_of(operation: Any) -> Called:
    """Returns the function of an operation made by `called`."""
    (function,) = operation.graph.get_collection(_collection(operation))
    return function


def mark_of(operation: Any) -> str | None:
    """Returns the mark of an operation of a trace."""
    if operation.type not in MARKED:
        return None
    attributes = operation.node_def.attr
    return attributes[NAME].s.decode() if NAME in attributes else None


def _collection(operation: Any) -> str:
    return f"{NAME}: {operation.name}"


def _marked(mark: str, result: tf.Tensor) -> tf.Tensor:
    set_mark(result.op, NAME, mark)
    return result
