"""Aggregates the gradients of the replicas to the global gradient.

The global gradient is the sum over replicas of `share_r * gradient_r`. `share_r` is the fraction of the global batch's
examples that replica r has. Every example thus counts once, however the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.packing import Packed

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
AllReduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]
AllGather = Callable[[tf.Tensor], tf.Tensor]
_SMALL = 1024


def aggregate(
    gradients: Sequence[Gradient],
    *,
    all_reduce: AllReduce,
    all_gather: AllGather,
    bucket_bytes: int,
) -> list[Gradient]:
    """Sums gradients over the replicas.

    Args:
        gradients: This replica's gradients, times its share; None for a variable without a gradient.
        all_reduce: Sums a list of dense tensors over the replicas.
        all_gather: Concatenates tensors of different length along the first dimension, in replica order.
        bucket_bytes: Gradients are sent in buckets of about this size. The last variables go first, since backward reaches
            them first. A bucket is then sent while the next is still being computed.

    Returns:
        The global gradients, in the given order. Sparse gradients stay sparse.

    Example:
        >>> one_replica = dict(all_reduce=lambda ts: ts, all_gather=lambda t: t, bucket_bytes=1 << 20)
        >>> g = aggregate([tf.constant([2.0]), None], **one_replica)
        >>> g[0].numpy().tolist(), g[1]
        ([2.0], None)
    """
    result: list[Gradient] = [None] * len(gradients)
    tensors = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    for bucket in buckets(tensors, [gradients[i] for i in tensors], bucket_bytes):
        for i, gradient in zip(bucket, all_reduce([gradients[i] for i in bucket]), strict=True):
            result[i] = gradient
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            result[i] = tf.IndexedSlices(
                values=all_gather(gradient.values),
                indices=all_gather(gradient.indices),
                dense_shape=gradient.dense_shape,
            )
    return result


def weighed(gradient: Gradient, weight: tf.Tensor | None) -> Gradient:
    """Multiplies a gradient with a replica's share of the global batch.

    Args:
        gradient: `tf.Tensor`, `tf.IndexedSlices` or None.
        weight: float32 scalar; None leaves the gradient unchanged. A weight of zero, that of a replica without examples, makes
            the gradient zero even if it is not finite.

    Returns:
        A gradient of the same type.
    """
    if gradient is None or weight is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(weighed(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return multiply_no_nan(gradient, weight)


def multiply_no_nan(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor with a share. The product with 0 is 0, even if the tensor is not finite.

    Args:
        tensor: A floating or complex tensor.
        factor: float32 scalar.

    Returns:
        A tensor of the same dtype and shape.

    Example:
        >>> multiply_no_nan(tf.constant([2.0, float("inf")], tf.bfloat16), tf.constant(0.0)).numpy().tolist()
        [0.0, 0.0]
    """
    return _rounded_once(tf.math.multiply_no_nan, tensor, factor)


def divide_no_nan(tensor: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """Divides a tensor by a share. The quotient is 0 if the share is 0. See `multiply_no_nan`."""
    return _rounded_once(tf.math.divide_no_nan, tensor, divisor)


def _rounded_once(operation: Callable[..., tf.Tensor], tensor: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Computes 16-bit floats in float32, since a share of 1/3 has an error of 0.2 percent in bfloat16.

    Moreover, TensorFlow has no `multiply_no_nan` of bfloat16 on GPUs, and would copy the tensor to the CPU.
    """
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(operation(tf.cast(tensor, tf.float32), share), tensor.dtype)
    return operation(tensor, tf.cast(share, tensor.dtype))


def zero_unless(has_examples: tf.Tensor, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Sets small gradients of a replica without examples to zero. The loss of such a replica, a mean over nothing, is NaN.

    Gradients that flow through the empty batch are zero already. Only parameters used after the mean (a learned loss weight,
    say) can get NaN. They are small, so only small dense gradients are set.

    Args:
        has_examples: bool scalar, whether this replica has examples.
        gradients: This replica's gradients.
    """

    def is_small(gradient: Gradient) -> bool:
        return isinstance(gradient, tf.Tensor) and (gradient.shape.num_elements() or _SMALL + 1) <= _SMALL

    result = list(gradients)
    small = [i for i, gradient in enumerate(gradients) if is_small(gradient)]
    packed = Packed([gradients[i] for i in small])  # A net has hundreds, and on a GPU each operation launches a kernel.
    zeroed = [tf.where(has_examples, flat, tf.zeros_like(flat)) for flat in packed.flats]
    for i, gradient in zip(small, packed.unpack(zeroed), strict=True):
        result[i] = gradient
    return result


def dense(gradient: Gradient) -> Gradient:
    """Converts a sparse gradient to a dense one; returns other gradients unchanged."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def has_fixed_rows(gradient: Gradient) -> bool:
    """Returns whether the rows of a sparse gradient do not depend on the batch, as in an embedding of positions.

    One device has one slice for such a row: the sum over all examples. Each replica has a slice with its part of that sum.
    Keras's optimizers square each slice separately, so the parts must be added before. Slices of rows that depend on the
    batch stay separate, as on one device.

    Args:
        gradient: `tf.Tensor`, `tf.IndexedSlices` or None.

    Returns:
        Whether the row numbers are computed from constants only. False outside a `tf.function`, where it is not known.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not tf.is_symbolic_tensor(gradient.indices):
        return False
    seen, waiting = set(), [gradient.indices]
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


def transformed(
    transform: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Gradient], variables: Sequence[Any]
) -> list[Gradient]:
    """Applies a function of (gradient, variable) pairs, or of gradients.

    Args:
        transform: Takes pairs and returns pairs of the same variables, or takes gradients and returns gradients.
        gradients: One gradient for each variable.
        variables: Keras variables.

    Returns:
        The transformed gradients.

    Raises:
        ConfigurationError: `transform` returned another number of gradients.

    Example:
        >>> transformed(lambda pairs: [(2 * g, v) for g, v in pairs], [1.0], ["v"])
        [2.0]
        >>> transformed(lambda gradients: [2 * g for g in gradients], [tf.constant(1.0)], ["v"])[0].numpy().item()
        2.0
    """
    try:
        result = list(transform(list(zip(gradients, variables, strict=True))))
        are_pairs = [isinstance(one, tuple) and len(one) == 2 and one[1] is v for one, v in zip(result, variables, strict=True)]
    except (TypeError, ValueError, AttributeError):
        are_pairs = []
    if are_pairs and all(are_pairs):
        return [gradient for gradient, _ in result]
    result = list(transform(list(gradients)))
    if len(result) != len(gradients):
        raise ConfigurationError(
            message(
                "A gradient transformer must return one gradient for each that it gets.",
                transformer=transform,
                gradients=len(gradients),
                returned=len(result),
            )
        )
    return result


def buckets(indices: Sequence[int], tensors: Sequence[tf.Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Groups tensors, the last first, into buckets of one dtype and about `bucket_bytes` bytes.

    Args:
        indices: The index of each tensor.
        tensors: The tensors. A tensor of unknown size closes its bucket.
        bucket_bytes: A bucket is closed when it has reached this size.

    Yields:
        Lists of indices.
    """
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for index, tensor in zip(reversed(indices), reversed(tensors), strict=True):
        elements = tensor.shape.num_elements()
        size = bucket_bytes if elements is None else elements * tensor.dtype.size
        members, filled = open_buckets.pop(tensor.dtype, ([], 0))
        members.append(index)
        if filled + size >= bucket_bytes:
            yield members
        else:
            open_buckets[tensor.dtype] = (members, filled + size)
    for members, _ in open_buckets.values():
        yield members
