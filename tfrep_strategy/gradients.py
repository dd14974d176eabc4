"""Aggregates the gradients of the replicas, which their shares have weighed (`shares.py`), to the global gradient."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy import slices
from tfrep_strategy.errors import ConfigurationError, message

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
AllReduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]
AllGather = Callable[[tf.Tensor], tf.Tensor]
Transform = Callable[[list[Any]], Sequence[Any]]

_REFUSALS = (TypeError, ValueError, AttributeError, tf.errors.OpError)
"""What a transformer raises that gets pairs in place of gradients, or the other way round."""
_form_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Whether a transformer takes pairs or gradients: `_of_pairs` or `_of_gradients`."""


def aggregate(
    gradients: Sequence[Gradient],
    *,
    all_reduce: AllReduce,
    all_gather: AllGather,
    bucket_bytes: int,
    sum_values: AllReduce | None = None,
    replicas: int = 1,
) -> list[Gradient]:
    """Sums the gradients of all replicas. Every replica calls it with its own gradients.

    Args:
        gradients: This replica's gradients, weighed by its share; None for a variable without a gradient.
        all_reduce: Sums a list of dense tensors over the replicas.
        all_gather: Concatenates tensors of different length along the first dimension, in replica order.
        bucket_bytes: Gradients are sent in buckets of about this size. The last variables go first, since backward reaches
            them first. A bucket is then sent while the next is still being computed.
        sum_values: Sums the values of slices that all replicas have (`slices.Kind.FIXED`). None: `all_reduce`, in the buckets.
        replicas: How many replicas there are.

    Returns:
        The global gradients, in the given order. Sparse gradients stay sparse, with the slices that one device has.

    Example:
        >>> one_replica = dict(all_reduce=lambda ts: ts, all_gather=lambda t: t, bucket_bytes=1 << 20)
        >>> g = aggregate([tf.constant([2.0]), None], **one_replica)
        >>> g[0].numpy().tolist(), g[1]
        ([2.0], None)
    """
    sparse = {i: slices.parts_of(gradient) for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)}
    fixed = [part.slices.values for parts in sparse.values() for part in parts if part.kind is slices.Kind.FIXED]
    tensors = [None if i in sparse else gradient for i, gradient in enumerate(gradients)]
    if sum_values is None:
        tensors += fixed
    result = list(tensors)
    for bucket in dense_buckets(tensors, bucket_bytes):
        for i, gradient in zip(bucket, all_reduce([tensors[i] for i in bucket]), strict=True):
            result[i] = gradient
    summed = iter(sum_values(fixed) if sum_values and fixed else result[len(gradients) :])
    for i, parts in sparse.items():
        result[i] = slices.joined([_global_slices(part, summed, all_gather, replicas) for part in parts])
    return result[: len(gradients)]


def _global_slices(
    part: slices.Part, summed: Iterator[tf.Tensor], all_gather: AllGather, replicas: int
) -> tf.IndexedSlices:
    own = part.slices
    if part.kind is slices.Kind.FIXED:
        return tf.IndexedSlices(next(summed), own.indices, own.dense_shape)
    of_all = tf.IndexedSlices(all_gather(own.values), all_gather(own.indices), own.dense_shape)
    if part.kind is slices.Kind.ALIKE:
        return slices.summed_where_alike(of_all, replicas)
    return slices.summed_by_row(of_all) if part.kind is slices.Kind.DISTINCT else of_all


def dense(gradient: Gradient) -> Gradient:
    """Converts a sparse gradient to a dense one; returns other gradients unchanged."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def transformed(
    transform: Transform, gradients: Sequence[Gradient], variables: Sequence[Any]
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
    known = None
    with contextlib.suppress(TypeError):  # It may be no key.
        known = _form_of.get(transform)
    forms = [known] if known else _fitting_forms(transform, gradients, variables) or [_of_pairs, _of_gradients]
    refusal: Exception | None = None
    for form in forms:
        try:
            result = form(transform, gradients, variables)
        except _REFUSALS as error:
            if form is forms[-1]:
                raise error from refusal  # Whichever of the two forms the transformer has: its own error is there.
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
    """Returns the form of a transformer in a list, which is empty if that cannot be told.

    It is called in graphs that are thrown away, so that no state changes. Whatever it raises there, it raises again when it is
    called for real.
    """
    for form in (_of_pairs, _of_gradients):
        with contextlib.suppress(Exception), tf.__internal__.FuncGraph("trial").as_default(), tf.variable_creator_scope(_refuse):
            form(transform, gradients, variables)
            return [form]
    return []


def _refuse(creator: Any, **options: Any) -> Any:
    raise RuntimeError("A variable that is made on trial would end with the graph.")


def known_bytes(gradients: Sequence[Gradient]) -> int:
    """Returns how many bytes the dense ones among gradients have whose shapes are known."""
    dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in dense)


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
