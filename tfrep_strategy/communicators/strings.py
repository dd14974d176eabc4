"""Strings travel as their bytes and their lengths: transports move numbers only."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

_CHARACTERS = [bytes([i]) for i in range(256)]


def gather_rows(all_gather: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Gathers rows of any dtype that `all_gather` takes, or of strings.

    Args:
        all_gather: Concatenates the numbers of the members along the first dimension, in the order of members.
        tensor: A dense tensor of rank one or more. The first dimension may differ between members.

    Example:
        >>> gather_rows(lambda own: tf.concat([own, own], 0), tf.constant([["a", ""]])).numpy().tolist()
        [[b'a', b''], [b'a', b'']]
    """
    if tensor.dtype != tf.string:
        return all_gather(tensor)
    lengths = all_gather(tf.strings.length(tensor))
    strings = from_bytes(all_gather(to_bytes(tensor)), tf.reshape(lengths, [-1]))
    return tf.ensure_shape(tf.reshape(strings, tf.shape(lengths)), [None, *tensor.shape[1:]])


def to_bytes(strings: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of all strings, one after the other.

    Example:
        >>> to_bytes(tf.constant(["a", "", "bc"])).numpy().tolist()
        [97, 98, 99]
    """
    return tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(strings, [-1])), tf.uint8)


def from_bytes(data: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Undoes `to_bytes`.

    Args:
        data: uint8, of shape `[sum(lengths)]`.
        lengths: How many bytes each string has, of shape `[strings]`.

    Example:
        >>> from_bytes(tf.constant([97, 98, 99], tf.uint8), tf.constant([1, 0, 2])).numpy().tolist()
        [b'a', b'', b'bc']
    """
    characters = tf.gather(tf.constant(_CHARACTERS), tf.cast(data, tf.int32))
    owners = tf.repeat(tf.range(tf.size(lengths)), lengths)
    return tf.strings.unsorted_segment_join(characters, owners, tf.size(lengths))
