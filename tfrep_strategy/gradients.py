"""From replica gradients to the global gradient.

The global gradient of a batch that is spread over replicas is the sum over replicas of `share_r * gradient_r`, where
`share_r` is the part of the batch's examples that replica r has: every example counts once, however the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
AllReduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]
AllGather = Callable[[tf.Tensor], tf.Tensor]


def aggregate(
    gradients: Sequence[Gradient],
    *,
    weight: tf.Tensor | None,
    all_reduce: AllReduce,
    all_gather: AllGather,
    bucket_bytes: int,
    densify: bool = False,
) -> list[Gradient]:
    """Sums weighed gradients over the replicas.

    Args:
        gradients: This replica's gradients; None where a variable has none.
        weight: float32 scalar that multiplies this replica's gradients, or None for a plain sum. A weight of zero makes a
            gradient zero even where it is not finite: a replica without examples has nothing to say.
        all_reduce: Sums a list of dense tensors over the replicas.
        all_gather: Concatenates tensors of different length along the first dimension, in replica order.
        bucket_bytes: Gradients are sent in groups of about this size. The last variables go first, since backward reaches
            them first, so that a bucket leaves while the next is still being computed.
        densify: Whether to send sparse gradients (`tf.IndexedSlices`) as dense ones.

    Returns:
        The global gradients, in the order given; sparse ones stay sparse unless `densify`.

    Example:
        >>> one_replica = dict(all_reduce=lambda ts: ts, all_gather=lambda t: t, bucket_bytes=1 << 20)
        >>> g = aggregate([tf.constant([2.0]), None], weight=tf.constant(0.5), **one_replica)
        >>> g[0].numpy().tolist(), g[1]
        ([1.0], None)
    """
    if densify:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    result: list[Gradient] = [None] * len(gradients)
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    for bucket in buckets(dense, [gradients[i] for i in dense], bucket_bytes):
        reduced = all_reduce([weighed(gradients[i], weight) for i in bucket])
        for i, gradient in zip(bucket, reduced, strict=True):
            result[i] = gradient
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            result[i] = tf.IndexedSlices(
                values=all_gather(weighed(gradient.values, weight)),
                indices=all_gather(gradient.indices),
                dense_shape=gradient.dense_shape,
            )
    return result


def weighed(tensor: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns `weight * tensor`, and zeros where the weight is zero."""
    return tensor if weight is None else tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


def buckets(indices: Sequence[int], tensors: Sequence[tf.Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Groups tensors, last first, so that each group has about `bucket_bytes` bytes and one dtype.

    Args:
        indices: What to call each tensor.
        tensors: The tensors; one of unknown size gets a bucket of its own.
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
