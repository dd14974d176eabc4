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

_OTHER_FORM = (TypeError, ValueError, AttributeError, NotImplementedError, tf.errors.OpError)
"""What a transformer of gradients may raise if it gets pairs, and the other way round."""

_known_forms: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Of each transformer, whether it takes pairs."""


def aggregate(
    gradients: Sequence[Gradient],
    *,
    all_reduce: AllReduce,
    all_gather: AllGather,
    bucket_bytes: int,
    sum_values: AllReduce | None = None,
) -> list[Gradient]:
    """Sums the gradients of all replicas. Every replica calls it with its own gradients.

    Args:
        gradients: This replica's gradients, weighed by its share; None for a variable without a gradient.
        all_reduce: Sums a list of dense tensors over the replicas.
        all_gather: Concatenates tensors of different length along the first dimension, in replica order.
        bucket_bytes: Gradients are sent in buckets of about this size. The last variables go first, since backward reaches
            them first. A bucket is then sent while the next is still being computed.
        sum_values: Sums the values of slices that all replicas have (`slices.Kind.FIXED`). None: `all_reduce`, in the buckets.

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
        result[i] = slices.joined([_global_slices(part, summed, all_gather) for part in parts])
    return result[: len(gradients)]


def _global_slices(part: slices.Part, summed: Iterator[tf.Tensor], all_gather: AllGather) -> tf.IndexedSlices:
    own = part.slices
    if part.kind is slices.Kind.FIXED:
        return tf.IndexedSlices(next(summed), own.indices, own.dense_shape)
    of_all = tf.IndexedSlices(all_gather(own.values), all_gather(own.indices), own.dense_shape)
    return slices.summed_by_row(of_all) if part.kind is slices.Kind.DISTINCT else of_all


def dense(gradient: Gradient) -> Gradient:
    """Converts a sparse gradient to a dense one; returns other gradients unchanged."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


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
    pairs = list(zip(gradients, variables, strict=True))
    takes_pairs, of_pairs = _takes_pairs(transform, gradients, variables)
    if takes_pairs:
        _remember(transform, True)
        return [gradient for gradient, _ in transform(pairs)]
    try:
        result = list(transform(list(gradients)))
        _remember(transform, False)
    except _OTHER_FORM as error:
        if of_pairs is not None and tf.executing_eagerly():  # It may look at values, which the trial does not have.
            with contextlib.suppress(*_OTHER_FORM):
                result = list(transform(pairs))
                if _are_pairs(result, variables):
                    return [gradient for gradient, _ in result]
        raise error from of_pairs  # Whichever of the two ways the transformer is for: its own error is there.
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


def _takes_pairs(
    transform: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Gradient], variables: Sequence[Any]
) -> tuple[bool, Exception | None]:
    """Tries, in a graph that never runs, whether a transformer takes pairs: it may have state, which a trial must not change.

    Returns:
        Whether it does; and its error, if it got pairs and raised one.
    """
    with contextlib.suppress(TypeError):
        if (known := _known_forms.get(_function_of(transform))) is not None:
            return known, None
    with tf.__internal__.FuncGraph("trial").as_default():
        try:
            result = list(transform(list(zip(map(_placeholder, gradients), variables, strict=True))))
            return _are_pairs(result, variables), None
        except _OTHER_FORM as error:
            return False, error


def _function_of(transform: Any) -> Any:
    """Returns what stays the same of a transformer: a method is another object each time that it is asked for."""
    return getattr(transform, "__func__", transform)


def _remember(transform: Any, takes_pairs: bool) -> None:
    with contextlib.suppress(TypeError):  # Some objects have no weak references.
        _known_forms[_function_of(transform)] = takes_pairs


def _placeholder(gradient: Gradient) -> Gradient:
    if gradient is None:
        return None
    return tf.nest.map_structure(lambda t: tf.compat.v1.placeholder(t.dtype, t.shape), gradient, expand_composites=True)


def _are_pairs(result: Sequence[Any], variables: Sequence[Any]) -> bool:
    if len(result) != len(variables) or not result:
        return False
    return all(isinstance(one, tuple) and len(one) == 2 and one[1] is v for one, v in zip(result, variables, strict=True))


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
