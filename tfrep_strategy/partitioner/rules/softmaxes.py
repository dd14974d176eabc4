"""Softmaxes along the axis of the rows, as where the rows of a batch are compared with each other.

Replicas send the largest value and the sum of the exponentials of their own rows: one number for each of the other axes, and not
the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.partitioner.placements import REPLICATE, Shard
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Tensor


class _Normalized(NamedTuple):
    """Values along the last axis: less the largest one, and the sum of their exponentials. The sum has the axis, too."""

    values: Tensor
    exponentials: Tensor
    total: Tensor


def _normalized(plan: Planner, x: Any, shard: Shard) -> _Normalized:
    add, send, own, last = plan.program.add, plan.program.send, plan.local(x), plan.program.constant([shard.axis])
    largest = add("Max", own, last, keep_dims=True)  # Of no values it is the least number there is.
    largest.shape = tf.TensorShape([*x.shape[:-1], 1])
    values = add("Sub", own, add("Max", send("gather", largest, shard.axis), last, keep_dims=True))
    exponentials = add("Exp", values)
    return _Normalized(values, exponentials, send("sum", add("Sum", exponentials, last, keep_dims=True)))


def _softmax(plan: Planner, operation: Any, shard: Shard) -> None:
    _, exponentials, total = _normalized(plan, operation.inputs[0], shard)
    plan.put(operation.outputs[0], shard, plan.program.add("RealDiv", exponentials, total))


def _log_softmax(plan: Planner, operation: Any, shard: Shard) -> None:
    values, _, total = _normalized(plan, operation.inputs[0], shard)
    plan.put(operation.outputs[0], shard, plan.program.add("Sub", values, plan.program.add("Log", total)))


def _sparse_cross_entropy(plan: Planner, operation: Any, shard: Shard) -> None:
    """The classes are rows: each replica has some of them, and knows of each label whether it is one of its own."""
    logits, labels = operation.inputs
    add, one, zero, nan = plan.program.add, *(plan.program.constant(x, logits.dtype) for x in (1.0, 0.0, float("nan")))
    rows = plan.elements(shard)
    first, count, classes = (plan.as_dtype(size, labels.dtype) for size in (rows.start, rows.count, rows.total))
    whole = plan.replicated(labels)
    own = add("OneHot", add("Sub", whole, first), plan.as_dtype(count, tf.int32), one, zero, axis=-1)
    # The loss of a label that is no class is no number, as on GPUs.
    is_class = add("LogicalAnd", add("GreaterEqual", whole, plan.program.constant(0, labels.dtype)), add("Less", whole, classes))
    _put_losses(plan, operation, shard, own, add("ExpandDims", add("SelectV2", is_class, zero, nan), -1))


def _cross_entropy(plan: Planner, operation: Any, shard: Shard) -> None:
    """The classes are rows, and so are their probabilities."""
    _put_losses(plan, operation, shard, plan.sharded(operation.inputs[1], shard), None)


def _put_losses(plan: Planner, operation: Any, shard: Shard, labels: Tensor, unknown: Tensor | None) -> None:
    add, last = plan.program.add, plan.program.constant([shard.axis])
    values, exponentials, total = _normalized(plan, operation.inputs[0], shard)
    own = add("Sum", add("Mul", labels, add("Sub", add("Log", total), values)), last, keep_dims=False)
    losses = plan.program.send("sum", own)
    gradient = add("Sub", add("RealDiv", exponentials, total), labels)
    if unknown is not None:
        losses, gradient = add("AddV2", losses, add("Squeeze", unknown, squeeze_dims=[-1])), add("AddV2", gradient, unknown)
    plan.put(operation.outputs[0], REPLICATE, losses)
    plan.put(operation.outputs[1], shard, gradient)


ACROSS_REPLICAS: dict[str, Callable[[Planner, Any, Shard], None]] = {
    "LogSoftmax": _log_softmax,
    "Softmax": _softmax,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
}
"""By the type of an operation: what plans it, where the rows are along its last axis."""
