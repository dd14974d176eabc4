"""Gradients as 16-bit floats on the wire: half the bytes of float32, with sums in float32.

A reduction in 16 bits rounds after each addition. Here each rank sums one part of the tensor in float32 instead: the ranks exchange
parts, add, and gather the sums, which is the ring all-reduce's traffic with half the bytes. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator, outside_xla
from tfrep_strategy.packing import Packed

DTYPES = {"bf16": tf.bfloat16, "fp16": tf.float16}
"""What a setting calls the dtypes in which gradients travel."""


def compressed_sum(communicator: Communicator, tensors: Sequence[tf.Tensor], kind: str) -> list[tf.Tensor]:
    """Sums tensors over the ranks. What is float32 travels in 16 bits.

    Args:
        communicator: Connects the ranks.
        tensors: Dense tensors of any shapes and dtypes.
        kind: "bf16" has the range of float32, and 8 bits of precision; "fp16" has 11 bits, and no number above 65504.

    Returns:
        The sums, equal on all ranks, in the given order. Each is rounded to 16 bits twice: before it is sent, and as a sum.
        It is exact if both are 16-bit floats anyway.

    Example:
        >>> alone = tfrep.communicators.SingleCommunicator()
        >>> compressed_sum(alone, [tf.constant([1.0, 2.0])], "bf16")[0].numpy().tolist()
        [1.0, 2.0]
    """
    if communicator.size == 1:
        return list(tensors)
    packed = Packed(tensors)
    flats = [_sum(communicator, f, DTYPES[kind]) if _has_32_bits(f) else communicator.all_reduce([f])[0] for f in packed.flats]
    return packed.unpack(flats)


def compressed_gather(communicator: Communicator, tensor: tf.Tensor, kind: str) -> tf.Tensor:
    """Concatenates the ranks' tensors along the first dimension, in rank order. float32 travels in 16 bits.

    Args:
        communicator: Connects the ranks.
        tensor: Of rank one or more, of any numeric dtype. The first dimension may differ between ranks.
        kind: "bf16" or "fp16".

    Returns:
        The tensor, equal on all ranks.
    """
    if communicator.size == 1 or not _has_32_bits(tensor):
        return communicator.all_gather(tensor)
    with outside_xla():
        row = tf.shape(tensor)[1:]
        rows = tf.reshape(tensor, [tf.shape(tensor)[0], tf.reduce_prod(row)])
        gathered = _floats(communicator.all_gather(_words(rows, DTYPES[kind])), DTYPES[kind])[:, : tf.shape(rows)[1]]
        whole = tf.reshape(gathered, tf.concat([[-1], row], 0))
        return tf.ensure_shape(whole, [None, *tensor.shape[1:]])


def compressed_scatter(communicator: Communicator, rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Sums a row for each rank over the ranks. float32 travels in 16 bits.

    Args:
        communicator: Connects the ranks.
        rows: Of shape `[size, width]`, of any numeric dtype.
        kind: "bf16" or "fp16".

    Returns:
        The own row of the sum that `compressed_sum` would give, of shape `[1, width]`.
    """
    if communicator.size == 1 or not _has_32_bits(rows):
        return communicator.reduce_scatter(rows)
    with outside_xla():
        return tf.cast(tf.cast(_own_sum(communicator, rows, DTYPES[kind]), DTYPES[kind]), tf.float32)


def _sum(communicator: Communicator, flat: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    with outside_xla():
        size = tf.size(flat)
        width = tf.maximum(-(-size // communicator.size), 1)
        parts = tf.reshape(tf.pad(flat, [[0, communicator.size * width - size]]), [communicator.size, width])
        own = _own_sum(communicator, parts, dtype)
        total = _floats(communicator.all_gather(_words(own, dtype)), dtype)[:, :width]
        return tf.ensure_shape(tf.reshape(total, [-1])[:size], flat.shape)


def _own_sum(communicator: Communicator, rows: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns this rank's row of the sum, in float32."""
    words, _ = communicator.all_to_all(_words(rows, dtype), tf.ones([communicator.size], tf.int32))
    return tf.reduce_sum(_floats(words, dtype)[:, : tf.shape(rows)[1]], 0, keepdims=True)


def _has_32_bits(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.float32


def _words(rows: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Packs two 16-bit floats into one word, which every transport moves. A row of odd length gets a zero more.

    The word is a float32, because TensorFlow keeps integers of 32 bits in the host's memory. It is moved, never computed with.
    """
    count, width = tf.unstack(tf.shape(rows))
    even = tf.pad(tf.cast(rows, dtype), [[0, 0], [0, width % 2]])
    return tf.bitcast(tf.reshape(even, [count, -(-width // 2), 2]), tf.float32)


def _floats(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `_words`, but for the zero."""
    count, width = tf.unstack(tf.shape(words))
    return tf.cast(tf.reshape(tf.bitcast(words, dtype), [count, 2 * width]), tf.float32)
