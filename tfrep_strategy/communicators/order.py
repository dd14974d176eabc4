"""Names and order of collectives. Both depend only on the structure of the program, and are equal on all ranks.

Transports match the collectives of different ranks by name. A counter would fail: a rank whose last batch has another
shape retraces a `tf.function` that the others do not retrace, and counts differently from then on. The rank may also reuse
the trace of an inner function. So functions are not counted, and the functions around a function are not part of its name.
Branches and loop bodies are always built with the function around them, and are counted there.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import BranchGraph, CondGradientGraph, run_independently, traced_function

_ordinals: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_own_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_graph_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def structural_name(kind: str) -> str:
    """Names the collective that is about to be called.

    Args:
        kind: The kind of the collective, such as `"all_reduce"`.

    Returns:
        The function around the call, the path of branches in it, and the number of earlier calls of its kind there.
        An eager call needs only its kind, since eager calls happen one after the other.
    """
    if tf.executing_eagerly():
        return f"eager.{kind}"
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph)}.{kind}{_next(graph, kind)}"


def replica_name(kind: str, replica: int) -> str:
    """Names a collective of one of several replicas that build their operations in one graph.

    Args:
        kind: The kind of the collective, such as `"all_reduce"`.
        replica: The replica that builds the operation. The functions and branches of each replica are counted separately.
            The id is not part of the name, since the name must be equal on all replicas.

    Returns:
        The same kind of name as from `structural_name`.
    """
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph, replica)}.{kind}{_next(graph, f'{replica}.{kind}')}"


def in_nested_graph() -> bool:
    """Returns whether the call is in a function or branch inside another function. It may run several times per step."""
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not tf.executing_eagerly() and getattr(outer, "building_function", False)


def _graph_name(graph: Any, replica: int | None = None) -> str:
    if graph not in _graph_names:
        if isinstance(graph, BranchGraph):  # Its own name contains the replica and a count of all branches.
            outer = graph.outer_graph
            _graph_names[graph] = f"{_graph_name(outer, replica)}/{_next(outer, f'{replica}.branch')}"
        else:
            own = _own_name(graph)
            # A function in itself runs at the same time, so its collectives need other names.
            _graph_names[graph] = own + "/in" * sum(_own_name(outer) == own for outer in _functions_around(graph))
    return _graph_names[graph]


def _own_name(graph: Any) -> str:
    """Returns the name of a function and its place in the source, since functions of one name may call each other."""
    if graph not in _own_names:
        # TensorFlow numbers the functions of a process, and ranks may have built different numbers of functions.
        own = re.sub(r"_\d+", "", getattr(graph, "name", None) or "graph")
        code = getattr(traced_function(graph), "__code__", None)
        place = f".{os.path.basename(code.co_filename)}.{code.co_firstlineno}" if code else ""
        # An operation may not be called `<lambda>` or `_step`.
        _own_names[graph] = re.sub(r"^_|[^A-Za-z0-9_.]", ".", own + place)
    return _own_names[graph]


def _functions_around(graph: Any) -> Iterator[Any]:
    while getattr(graph := getattr(graph, "outer_graph", None), "building_function", False):
        if not isinstance(graph, BranchGraph):
            yield graph


def _next(graph: Any, label: str) -> int:
    counts = _ordinals.setdefault(graph, {})
    counts[label] = counts.get(label, -1) + 1
    return counts[label]


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
        with tf.init_scope():  # A graph that is not inside eager execution needs separate handles.
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
        if isinstance(graph, CondGradientGraph):  # Its captures must belong to the graph around it.
            return graph.capture(self._in_graph(graph.outer_graph))
        # The gradient of a loop body can capture only tensors that the body itself has captured.
        if hasattr(graph, "_forward_graph"):
            return graph.capture(self._in_graph(graph._forward_graph))
        # Every graph captures the handle itself, like the functions called inside it. If a graph captured it from the graph
        # around it, TensorFlow would see two resources, and would not order the collectives of a loop and of functions.
        return graph.capture(self._handle)

    def mark(self) -> Any:
        """Adds an operation that runs after all earlier operations on the resource, and before all later ones."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle(), value=tf.constant(0.0))

    def keep(self, tensors: Any) -> None:
        """Makes the current function compute tensors before it ends, even if they are unused.

        Calls of the function stay in program order. Within one call, nothing waits for the tensors.
        """
        with tf.control_dependencies(tf.nest.flatten(tensors)):
            run_independently(self.mark())

    def zero(self) -> tf.Tensor:
        """Returns an int32 scalar 0 whose value TensorFlow's optimizer cannot know."""
        return tf.cast(tf.raw_ops.ReadVariableOp(resource=self.handle(), dtype=tf.float32), tf.int32)
