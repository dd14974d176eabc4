"""Marks on operations of a step while it is traced: what replicas do there. On one device each of them gives what it gets.

A mark is an attribute of an operation. Its rule is in `rules/effects.py`. Some give a replica a value of its own, `Own`: what is
computed of such values is written for one replica. It comes out as a whole or as a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import set_mark

NAME = "_tfrep_mark"

GRADIENT, SLICES, REPLICA, OWN_ROW, ALL_ROWS, ADDEND, OWN_SUM, SPREAD, CALL, BATCH = (
    "gradient", "slices", "replica", "own row", "all rows", "addend", "own sum", "spread", "call", "batch",
)  # fmt: skip
MARKED = frozenset({"BroadcastTo", "EagerPyFunc", "GatherV2", "Identity", "IdentityN"})
"""The types of operations that may have a mark."""

Called = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Marks a gradient. Where replicas hold addends, these travel as gradients do."""
    return _marked(GRADIENT, tf.identity(tensor))


def slices(tensor: tf.Tensor) -> tf.Tensor:
    """Marks the values of a sparse gradient. Where replicas hold rows, these travel as gradients do."""
    return _marked(SLICES, tf.identity(tensor))


def replica() -> tf.Tensor:
    """Returns the number of the replica, an int32 scalar of its own."""
    return _marked(REPLICA, tf.identity(tf.constant(0)))


def own_row(rows: tf.Tensor) -> tf.Tensor:
    """Returns the row of each replica, of shape `[width]`, of a gradient in shape `[replicas, width]`."""
    return _marked(OWN_ROW, tf.raw_ops.GatherV2(params=rows, indices=0, axis=0))


def all_rows(row: tf.Tensor, replicas: int) -> tf.Tensor:
    """Returns the rows of all replicas, of shape `[replicas, width]`, given the own one of each."""
    return _marked(ALL_ROWS, tf.raw_ops.BroadcastTo(input=row, shape=[replicas, *row.shape]))


def addend(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the values that replicas have of their own."""
    return _marked(ADDEND, tf.identity(tensor))


def own_sum(rows: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns, for each replica, the sum of its own rows over axes, which stay.

    Args:
        rows: Their first axis is that of the batch.
        axes: That axis, and others.
    """

    @tf.custom_gradient
    def summed(rows: tf.Tensor) -> Any:
        own = _marked(OWN_SUM, tf.identity(tf.reduce_sum(rows, axes, keepdims=True)))
        return own, lambda gradient: tf.broadcast_to(spread(gradient, rows), tf.shape(rows))

    return summed(rows)


def spread(own: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the value of a replica for each of its rows.

    Args:
        own: What each replica has of its own; its first axis is 1.
        rows: Has as many rows.
    """

    @tf.custom_gradient
    def spread_out(own: tf.Tensor) -> Any:
        shape = tf.concat([tf.shape(rows)[:1], own.shape[1:]], 0)
        return _marked(SPREAD, tf.raw_ops.BroadcastTo(input=own, shape=shape)), lambda gradient: own_sum(gradient, [0])

    return spread_out(own)


def batch(tensors: Sequence[tf.Tensor], replicas: int) -> list[tf.Tensor]:
    """Marks tensors as a batch whose rows the replicas share, behind this mark in a body of a loop or a branch.

    Args:
        tensors: All have as many rows.
        replicas: How many share them.
    """
    _, *marked = tf.raw_ops.IdentityN(input=[tf.constant(replicas), *tensors])
    _marked(BATCH, marked[0])
    return list(marked)


def called(function: Called, tensors: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Returns what a function makes of tensors. Each replica calls it with its addends and rows, and all get the same from it.

    Args:
        function: Takes and returns tensors.
        tensors: The tensors.
        results: What it returns.
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
    """Returns the function of an operation that `called` has made."""
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
