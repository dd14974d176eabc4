"""In which collective of a function this rank is: the function writes it down, and another thread reads it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.calls import Call, user_line
from tfrep_strategy.communicators.order import Order


class Position:
    """Where a rank is among the collectives of a group. Ranks that are in different ones wait for each other for ever."""

    _names = itertools.count()

    def __init__(self) -> None:
        name = f"tfrep_position_{next(self._names)}"
        self._count = Order(f"{name}_count", "CPU:0")
        self._where = Order(f"{name}_where", "CPU:0", shape=None)
        self._calls: list[Call] = []

    def enter(self, kind: str, place: str, tensors: Sequence[tf.Tensor], sizes: tf.Tensor) -> list[Any]:
        """Notes a collective.

        Args:
            kind: Name of the collective.
            place: Name of its place in the program.
            tensors: What it sends.
            sizes: `sizes_of(tensors)`.

        Returns:
            The operations that do so, to be run before it. None when eager: what is eager is told to the other ranks.
        """
        if tf.executing_eagerly():
            return []
        with tf.device("CPU:0"):
            number = tf.constant([len(self._calls)])
            line = user_line((frame.filename, frame.lineno) for frame in reversed(number.op.traceback))
            self._calls.append(Call(kind, f"in {place}", tuple((tensor.dtype.name, ()) for tensor in tensors), line))
            count = tf.raw_ops.AssignAddVariableOp(resource=self._count.handle(), value=tf.constant(1))
            where = tf.concat([number, sizes], 0)
            return [count, tf.raw_ops.AssignVariableOp(resource=self._where.handle(), value=where)]

    def leave(self, results: tf.Tensor) -> None:
        """Notes that the collective has given its results."""
        if not tf.executing_eagerly():
            with tf.device("CPU:0"), tf.control_dependencies([results]):
                tf.raw_ops.AssignVariableOp(resource=self._where.handle(), value=tf.zeros([0], tf.int32))

    def read(self) -> tuple[int, Call] | None:
        """Tells how many collectives in functions this rank has begun, and which one it is in; None if it is in none."""
        count, where, again = (each.read().numpy().tolist() for each in (self._count, self._where, self._count))
        if not isinstance(where, list) or not where or count != again:
            return None
        number, *sizes = where
        call, tensors = self._calls[number], []
        for dtype, _ in call.tensors:
            rank, *sizes = sizes
            tensors.append((dtype, tuple(sizes[:rank])))
            sizes = sizes[rank:]
        return count, call._replace(tensors=tuple(tensors))


def sizes_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the shapes of tensors as one int32 vector: of each, how many dimensions it has, and their sizes."""
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return tf.constant([n for tensor in tensors for n in (tensor.shape.rank, *tensor.shape)], tf.int32)
    with tf.device("CPU:0"):
        return tf.concat([part for tensor in tensors for part in (tf.rank(tensor)[tf.newaxis], tf.shape(tensor))], 0)
