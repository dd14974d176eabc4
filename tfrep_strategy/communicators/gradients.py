"""The aggregation of the replicas' gradients, weighted by their shares (`core/step.py`), to the global gradient."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
AllReduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]
AllGather = Callable[[tf.Tensor], tf.Tensor]
Transform = Callable[[list[Any]], Sequence[Any]]

_REFUSALS = (TypeError, ValueError, AttributeError, tf.errors.OpError)
"""Errors of a transformer that gets pairs instead of gradients, or the reverse."""
_form_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The form of each transformer, by its arguments: `_of_pairs` or `_of_gradients`."""


def aggregate(gradients: Sequence[Gradient], *, all_reduce: AllReduce, all_gather: AllGather, bucket_bytes: int) -> list[Gradient]:
    """Sums the gradients of all replicas. Every replica calls it with its own gradients.

    Args:
        gradients: This replica's gradients, weighted by its share; None for a variable without a gradient.
        all_reduce: Sums a list of dense tensors over the replicas.
        all_gather: Concatenates tensors of different length along the first dimension, in replica order.
        bucket_bytes: Gradients are sent in buckets of about this size. The last variables go first, since backward reaches
            them first. A bucket is then sent while the next is still being computed.

    Returns:
        The global gradients, in the given order. Sparse gradients stay sparse, with the slices of all replicas.

    Example:
        >>> one_replica = dict(all_reduce=lambda ts: ts, all_gather=lambda t: t, bucket_bytes=1 << 20)
        >>> g = aggregate([tf.constant([2.0]), None], **one_replica)
        >>> g[0].numpy().tolist(), g[1]
        ([2.0], None)
    """
    result = list(gradients)
    for bucket in dense_buckets(gradients, bucket_bytes):
        for i, gradient in zip(bucket, all_reduce([gradients[i] for i in bucket]), strict=True):
            result[i] = gradient
    for i, own in enumerate(gradients):
        if isinstance(own, tf.IndexedSlices):
            result[i] = tf.IndexedSlices(all_gather(own.values), all_gather(own.indices), own.dense_shape)
    return result


def summed_where_alike(gathered: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Sums the slices of all replicas, the first of each with the first of the others, if all have the same rows.

    Args:
        gathered: The slices of all replicas, in replica order.
        replicas: The number of replicas.

    Returns:
        As many slices as one replica has; or `gathered` if the rows of two replicas differ.

    Example:
        >>> of_two = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0], [8.0]]), tf.constant([5, 3, 5, 3]), tf.constant([6, 1]))
        >>> once = summed_where_alike(of_two, 2)
        >>> once.indices.numpy().tolist(), once.values.numpy().tolist()
        ([5, 3], [[5.0], [10.0]])
    """
    values, rows = gathered.values, gathered.indices
    each = tf.size(rows) // replicas
    of_first = tf.tile(rows[:each], [replicas])
    are_alike = tf.reduce_all(tf.equal(rows[: replicas * each], of_first)) & (tf.size(rows) == replicas * each)

    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_sum(tf.reshape(values, tf.concat([[replicas, each], tf.shape(values)[1:]], 0)), 0), rows[:each]

    return tf.IndexedSlices(*tf.cond(are_alike, summed, lambda: (values, rows)), gathered.dense_shape)


def dense(gradient: Gradient) -> Gradient:
    """Converts a sparse gradient to a dense one; returns other gradients unchanged."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def transformed(transform: Transform, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
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
    known = None
    with contextlib.suppress(TypeError):  # The transformer may not be hashable.
        known = _form_of.get(transform)
    forms = [known] if known else _fitting_forms(transform, gradients, variables) or [_of_pairs, _of_gradients]
    refusal: Exception | None = None
    for form in forms:
        try:
            result = form(transform, gradients, variables)
        except _REFUSALS as error:
            if form is forms[-1]:
                raise error from refusal  # Shows the transformer's own error, whichever its form is.
            refusal = error
        else:
            break
    if gradients:
        with contextlib.suppress(TypeError):
            _form_of[transform] = form
    return result


def _of_pairs(transform: Transform, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
    result = list(transform(list(zip(gradients, variables, strict=True))))
    for one, variable in zip(result, variables, strict=True):
        if not isinstance(one, tuple) or len(one) != 2 or one[1] is not variable:
            raise TypeError(f"This is not a pair of a gradient and its variable: {one}")
    return [gradient for gradient, _ in result]


def _of_gradients(transform: Transform, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
    result = list(transform(list(gradients)))
    if len(result) != len(gradients):
        raise ConfigurationError(
            message(
                "A gradient transformer must return one gradient for each that it gets.",
                hint="return None for a gradient that is to be left out.",
                transformer=transform,
                gradients=len(gradients),
                returned=len(result),
            )
        )
    return result


def _fitting_forms(transform: Transform, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Any]:
    """Returns the form of a transformer in a list, which is empty if it cannot be determined.

    The transformer is called in graphs that are discarded, so that no state changes. An error is raised again in the
    real call.
    """
    for form in (_of_pairs, _of_gradients):
        with contextlib.suppress(Exception), tf.__internal__.FuncGraph("trial").as_default(), tf.variable_creator_scope(_refuse):
            form(transform, gradients, variables)
            return [form]
    return []


def _refuse(creator: Any, **options: Any) -> Any:
    raise RuntimeError("A variable that is made on trial would end with the graph.")


def dense_buckets(gradients: Sequence[Gradient], bucket_bytes: int) -> Iterator[list[int]]:
    """Groups the dense ones among gradients as `buckets` does, and yields lists of their indices."""
    indices = [i for i, gradient in enumerate(gradients) if gradient is not None and not isinstance(gradient, tf.IndexedSlices)]
    return buckets(indices, [gradients[i] for i in indices], bucket_bytes)


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
