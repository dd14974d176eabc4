"""Joins the outputs of the replicas of several processes along the batch."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.strings import gather_rows


def gathered(value: Any, communicator: Communicator) -> Any:
    """Concatenates the values of the ranks, in rank order. Every process must call it.

    Args:
        value: A dense, sparse or ragged tensor whose first dimension is the batch, or a scalar; scalars are stacked.
        communicator: The communicator of the ranks.

    Returns:
        A tensor of the same kind.
    """
    gather = functools.partial(gather_rows, communicator.all_gather)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(gathered(value.values, communicator), gather(value.row_lengths()))
    if isinstance(value, tf.SparseTensor):
        shapes = gather(value.dense_shape[tf.newaxis])
        before = tf.reduce_sum(shapes[: communicator.rank, 0])
        offset = tf.concat([[before], tf.zeros([tf.size(value.dense_shape) - 1], tf.int64)], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(gather(value.indices + offset), gather(value.values), shape)
    return gather(value[tf.newaxis] if value.shape.rank == 0 else value)


def without_rows(value: Any) -> Any:
    """Returns a tensor like another one, with no rows. It keeps no memory of the other one.

    Args:
        value: A dense, sparse or ragged tensor whose first dimension is the batch.

    Example:
        >>> without_rows(tf.ones([3, 2])).shape.as_list()
        [0, 2]
    """
    if isinstance(value, tf.RaggedTensor):
        splits = tf.zeros([1], value.row_splits.dtype)
        return tf.RaggedTensor.from_row_splits(without_rows(value.values), splits, validate=False)
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([[0], value.dense_shape[1:]], 0)
        return tf.SparseTensor(without_rows(value.indices), without_rows(value.values), shape)
    return tf.zeros(tf.concat([[0], tf.shape(value)[1:]], 0), value.dtype)
