"""`jit_compile=True` on replicas: XLA compiles the operations between the collectives of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.devices import full_name
from tfrep_strategy.cluster.profiles.traces import HOST_COLLECTIVE
from tfrep_strategy.core.tf import set_lazy_xla, xla_cpu_kernel_names, xla_gpu_kernel_names
from tfrep_strategy.errors import warn

# Communication between replicas is not compiled, and the others only pass values on.
_NOT_MEANT = ("Collective", "Horovod", "Nccl", "ScopedAllocator", "Placeholder", "VarHandleOp", "_Arg", "_Retval")
# The shapes of their results depend on their values. Beside collectives, XLA fails or computes wrong values with such shapes.
_OF_OPEN_SHAPES = ("Where", "Unique", "DynamicPartition")


def compiled_between_collectives(step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step so that XLA compiles its parts: forward, backward, update.

    Operations that XLA has no kernel for run without XLA, and a warning names them, once for each wrapped step.
    """
    reported: set[str] = set()

    def step(batch: Any) -> Any:
        if tf.executing_eagerly():
            return step_function(batch)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        with _compiled_for_all_replicas(graph):
            result = step_function(batch)
        beyond_xla = _without_kernel(graph.get_operations()[before:]) - reported
        if beyond_xla:
            reported.update(beyond_xla)
            warn(
                f"jit_compile=True: XLA cannot compile {', '.join(sorted(beyond_xla))}. These operations run without it, "
                f"the others of the step are compiled.",
            )
        return result

    return step


class _Scope:
    """The scope in which the replicas of one process build a graph, and the number of replicas inside."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.stack = contextlib.ExitStack()


_scopes: weakref.WeakKeyDictionary[Any, _Scope] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _compiled_for_all_replicas(graph: Any) -> Iterator[None]:
    """Marks operations for XLA, from the entry of the first replica to the exit of the last one.

    The mark belongs to the graph, which replicas build in turns. A replica that leaves must not remove the mark for the others,
    and the last must not leave it behind.
    """
    scope = _scopes.setdefault(graph, _Scope())
    if not scope.num_inside:
        scope.stack.enter_context(tf.xla.experimental.jit_scope(_is_compiled))
    scope.num_inside += 1
    try:
        yield
    finally:
        scope.num_inside -= 1
        if not scope.num_inside:
            scope.stack.close()


def _is_compiled(node: Any) -> bool:
    """Returns whether XLA compiles an operation.

    For `tf.slice` at a place that is not constant, as in the gradient of `tf.pad`, TensorFlow adds constants on /job:localhost.
    If ranks are tasks of its cluster, it then refuses to compile them together with the others, which are on /job:worker.
    """
    return not node.op.startswith(_OF_OPEN_SHAPES) and (node.op != "Slice" or not _has_cluster())


def _has_cluster() -> bool:
    return not full_name("CPU:0").startswith("/job:localhost")


@contextlib.contextmanager
def compiled_at_once() -> Iterator[None]:
    """Makes XLA compile parts of a step when a shape first occurs, as it compiles whole steps.

    Otherwise a shape that occurs once, such as the last batch's, runs without XLA. XLA on CPUs draws other random numbers.
    """
    before = set_lazy_xla(False)
    try:
        yield
    finally:
        set_lazy_xla(before)


class Prediction:
    """Presents a model to Keras with another predict step.

    Args:
        model: The model.
        predict_step: The step of a replica.
        jit_compile: Whether XLA compiles the whole step, which then has no collectives.
    """

    def __init__(self, model: Any, predict_step: Callable[[Any], Any], jit_compile: bool) -> None:
        self._model, self.predict_step, self.jit_compile = model, predict_step, jit_compile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _without_kernel(operations: list[tf.Operation]) -> set[str]:
    kernel_names = xla_gpu_kernel_names if tf.config.list_logical_devices("GPU") else xla_cpu_kernel_names
    return {name for name in _types(operations) if not name.startswith(_NOT_MEANT)} - set(kernel_names())


def _types(operations: list[tf.Operation]) -> Iterator[str]:
    """Yields the types of operations, and of those in the functions and branches that they call, except collectives."""
    functions: dict[str, Any] = {}
    for operation in operations:
        if HOST_COLLECTIVE not in operation.name:
            yield operation.type
        if not functions and any(value.type == "func" for value in operation.op_def.attr):
            library = operation.graph.as_graph_def().library.function
            functions = {function.signature.name: function.node_def for function in library}
    for nodes in functions.values():
        yield from (node.op for node in nodes if HOST_COLLECTIVE not in node.name)
