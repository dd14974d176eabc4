"""Keeps the collectives of one device in program order."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import CondGradientGraph, run_independently

_orders: weakref.WeakKeyDictionary[Any, dict[str, Order]] = weakref.WeakKeyDictionary()


class Order:
    """A resource that collectives share, because TensorFlow keeps operations on one resource in program order.

    Its dtype is float32. An int32 variable has no kernel on GPUs and would be on the CPU; a collective runs on the device
    of the resource that it uses.

    Args:
        name: A name that is unique in this process.
        device: The device of the resource.
    """

    def __init__(self, name: str, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name, name="collective_order")
            if tf.executing_eagerly():
                tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(0.0))

    @staticmethod
    def of(device: str) -> Order:
        """Returns the order of all groups that a device belongs to.

        NCCL waits forever if two devices launch the collectives of two groups in different orders.
        """
        with tf.init_scope():  # A graph that is not inside eager execution needs handles of its own.
            owner = Order if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        orders = _orders.setdefault(owner, {})
        if device not in orders:
            orders[device] = Order(f"tfrep_collective_order_{device}", device)
        return orders[device]

    def handle(self) -> tf.Tensor:
        """Returns the resource, for use in the graph that is being built."""
        return self._handle if tf.executing_eagerly() else self._in_graph(tf.compat.v1.get_default_graph())

    def _in_graph(self, graph: Any) -> tf.Tensor:
        if not getattr(graph, "building_function", False):
            return self._handle
        if isinstance(graph, CondGradientGraph):  # What it captures must belong to the graph around it.
            return graph.capture(self._in_graph(graph.outer_graph))
        # The gradient of a loop body can capture only tensors that the body itself has captured.
        if hasattr(graph, "_forward_graph"):
            return graph.capture(self._in_graph(graph._forward_graph))
        # Every graph captures the handle itself, as calls of functions inside it do: were it captured from the graph
        # around it, TensorFlow would see two resources, and would not keep collectives of a loop and of functions in order.
        return graph.capture(self._handle)

    def mark(self) -> Any:
        """Adds an operation that runs after all earlier operations on the resource, and before all later ones."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle(), value=tf.constant(0.0))

    def keep(self, tensors: Any) -> None:
        """Makes the current function compute tensors before it ends, also if nothing uses them.

        Calls of the function stay in program order. Within one call, nothing waits for the tensors.
        """
        with tf.control_dependencies(tf.nest.flatten(tensors)):
            run_independently(self.mark())

    def zero(self) -> tf.Tensor:
        """Returns an int32 scalar 0. TensorFlow's optimizer cannot know that it is 0."""
        return tf.cast(tf.raw_ops.ReadVariableOp(resource=self.handle(), dtype=tf.float32), tf.int32)
