"""What TensorFlow would do with a graph on GPUs, read from its registry of kernels: no GPU is needed for that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

# Operations that call functions, whose own operations are looked at instead.
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}
# They are taken apart or replaced before a graph runs.
_NEVER_RUN = {"Placeholder", "NoOp"}


@functools.cache
def _kernels(operation: str) -> list[Any]:
    # `DEFAULT` kernels serve every kind of device that has none of its own.
    return [k for k in kernels.get_registered_kernels_for_op(operation).kernel if k.device_type in ("GPU", "DEFAULT")]


def has_gpu_kernel(node: Any) -> bool:
    """Whether TensorFlow can run a `NodeDef` on a GPU, given its dtypes."""
    if node.op in _CALLS | _NEVER_RUN:
        return True
    return any(all(node.attr[c.name].type in c.allowed_values.list.type for c in kernel.constraint) for kernel in _kernels(node.op))


def nodes_on(graph: tf.Graph, is_gpu: Callable[[str], bool]) -> Iterator[Any]:
    """Gives the nodes of a graph, and of its functions, that are placed on a device."""
    definition = graph.as_graph_def()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        yield from (node for node in nodes if is_gpu(node.device))


def without_gpu_kernel(graph: tf.Graph, is_gpu: Callable[[str], bool] = lambda device: "GPU" in device) -> set[tuple[str, ...]]:
    """Lists the operations, with their dtypes, that were placed on GPUs and that TensorFlow could only run on the CPU."""
    return {
        (node.op, *sorted({tf.as_dtype(attr.type).name for attr in node.attr.values() if attr.type}))
        for node in nodes_on(graph, is_gpu)
        if not has_gpu_kernel(node)
    }
