"""Keeps the collectives of one member in program order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import BranchGraph


class Order:
    """A resource that collectives share: TensorFlow keeps operations on one resource in program order.

    Args:
        name: Unique in this process.
        device: Where it lives.
    """

    def __init__(self, name: str, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name, name="collective_order")
            if tf.executing_eagerly():
                tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(0))

    def handle(self) -> tf.Tensor:
        """Returns the resource, for use in the graph that is being built."""
        return self._handle if tf.executing_eagerly() else self._in_graph(tf.compat.v1.get_default_graph())

    def _in_graph(self, graph: Any) -> tf.Tensor:
        if not getattr(graph, "building_function", False):
            return self._handle
        # The gradient of a branch or a loop body can take what the body itself has taken from the graph around it, and
        # nothing else. A function takes it from nowhere: branches share its trace, and not what one of them has taken.
        if hasattr(graph, "_forward_graph"):
            return self._in_graph(graph._forward_graph)
        return graph.capture(self._in_graph(graph.outer_graph) if isinstance(graph, BranchGraph) else self._handle)

    def mark(self) -> Any:
        """Makes an operation that comes after all that was marked or ordered before, and before all that follows."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle(), value=tf.constant(0))

    def zero(self) -> tf.Tensor:
        """Returns an int32 scalar of 0 that no optimisation of the graph can know to be 0."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle(), dtype=tf.int32)
