"""Adds what transports do not support: strings, bool, complex numbers, and axes other than the first."""

from __future__ import annotations

import tensorflow as tf

from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.communicators.strings import from_bytes, gather_rows, to_bytes


def to_real(tensor: tf.Tensor) -> tf.Tensor:
    """Converts bool to int32, and complex numbers to pairs along a new last dimension."""
    if tensor.dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tensor


def from_real(real: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Undoes `to_real`."""
    if like.dtype.is_complex:
        return tf.complex(real[..., 0], real[..., 1])
    return tf.cast(real, like.dtype)


def product(flow: Flow, tensor: tf.Tensor) -> tf.Tensor:
    """Multiplies complex tensors over the replicas. Their product is not the pair of the products of their parts."""
    return tf.reduce_prod(gather_along(flow, tensor[tf.newaxis], 0), 0)


def gather_along(flow: Flow, tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Gathers a tensor of any dtype along any axis."""
    axis %= tensor.shape.rank
    order = [axis] + [i for i in range(tensor.shape.rank) if i != axis]
    moved = tensor if axis == 0 else tf.transpose(tensor, order)
    gathered = from_real(gather_rows(flow.all_gather, to_real(moved)), moved)
    return gathered if axis == 0 else tf.transpose(gathered, [order.index(i) for i in range(tensor.shape.rank)])


def broadcast_strings(flow: Flow, tensor: tf.Tensor, root: int) -> tf.Tensor:
    """Sends strings as bytes. Only the root knows how many, so that all gather, and the others send none."""
    is_root = tf.equal(flow.communicator.rank, root)
    lengths = flow.broadcast([tf.strings.length(tensor)], root)[0]
    sent = to_bytes(tf.where(is_root, tensor, tf.constant("")))
    return tf.reshape(from_bytes(flow.all_gather(sent), tf.reshape(lengths, [-1])), tf.shape(tensor))


def exchange_rows(flow: Flow, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges rows of any dtype."""
    if tensor.dtype != tf.string:
        rows, received = flow.all_to_all(to_real(tensor), splits)
        return from_real(rows, tensor), received
    lengths = tf.reshape(tf.strings.length(tensor), [tf.shape(tensor)[0], -1])
    received_lengths, received = flow.all_to_all(lengths, splits)
    part = tf.RaggedTensor.from_row_lengths(tf.reduce_sum(lengths, 1), splits)
    data, _ = flow.all_to_all(to_bytes(tensor), tf.reduce_sum(part, 1))
    strings = from_bytes(data, tf.reshape(received_lengths, [-1]))
    return tf.reshape(strings, tf.concat([[-1], tf.shape(tensor)[1:]], 0)), received
