"""Encodings of tensors for transport: packed tensors, floats in 16 bits, floats as ordered integers, strings as bytes.

Gradient compression sends 16-bit floats, half the bytes of float32, with sums in float32. A reduction in 16 bits would round
after each addition. So each rank sums one part of the tensor in float32: the ranks exchange parts, add, and gather the sums, which
is the ring all-reduce's traffic with half the bytes. All ranks get the same bits.

Ordered integers are for transports whose minimum and maximum of floats may lose NaN. With IEEE 754, non-negative floats have the
order of their bits. The bits of negative floats count down, so they are flipped. NaN becomes the integer that wins: the
largest for "max", the smallest for "min". Both convert back to a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator, outside_xla


class Packed:
    """Tensors concatenated to one flat tensor for each dtype.

    Args:
        tensors: Dense tensors of any shapes and dtypes.

    Attributes:
        flats: One tensor of rank 1 for each dtype, in order of first appearance.

    Example:
        >>> packed = Packed([tf.constant([1.0, 2.0]), tf.constant(3), tf.constant([[4.0]])])
        >>> [flat.numpy().tolist() for flat in packed.flats]
        [[1.0, 2.0, 4.0], [3]]
        >>> [tensor.numpy().tolist() for tensor in packed.unpack([2 * flat for flat in packed.flats])]
        [[2.0, 4.0], 6, [[8.0]]]
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._tensors = list(tensors)
        by_dtype: dict[tf.DType, list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        self._members = list(by_dtype.values())
        self.flats = [self._flat(members) for members in self._members]

    def _flat(self, members: list[int]) -> tf.Tensor:
        parts = [tf.reshape(self._tensors[i], [-1]) for i in members]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def unpack(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Cuts flat tensors into tensors with the shapes of the original ones.

        Args:
            flats: A tensor for each of `self.flats`, of the same size. The dtypes may differ.

        Returns:
            A tensor for each original tensor, in order, of the same shape.
        """
        result: list[Any] = [None] * len(self._tensors)
        for members, flat in zip(self._members, flats, strict=True):
            sizes = [_size(self._tensors[i]) for i in members]
            for i, piece in zip(members, [flat] if len(members) == 1 else tf.split(flat, sizes), strict=True):
                result[i] = _of_shape(self._tensors[i], piece)
        return result


def _of_shape(tensor: tf.Tensor, piece: tf.Tensor) -> tf.Tensor:
    if tensor.shape.is_fully_defined():
        return tf.reshape(piece, tensor.shape)
    return tf.ensure_shape(tf.reshape(piece, tf.shape(tensor)), tensor.shape)


def _size(tensor: tf.Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


DTYPES = {"bf16": tf.bfloat16, "fp16": tf.float16}
"""The 16-bit dtypes of gradients, by their names in settings."""


def compressed_sum(communicator: Communicator, tensors: Sequence[tf.Tensor], kind: str) -> list[tf.Tensor]:
    """Sums tensors over the ranks. Float32 tensors travel in 16 bits.

    Args:
        communicator: Connects the ranks.
        tensors: Dense tensors of any shapes and dtypes.
        kind: "bf16" has the range of float32, and 8 bits of precision; "fp16" has 11 bits, and at most 65504.

    Returns:
        The sums, equal on all ranks, in the given order. Each is rounded to 16 bits twice: before it is sent, and as a sum.
        It is exact if both are representable in 16 bits.

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
        This rank's row of the sum that `compressed_sum` would return, of shape `[1, width]`.
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
    """Packs two 16-bit floats into one word, which every transport moves. A row of odd length is padded with a zero.

    The word is a float32, because TensorFlow keeps int32 in host memory. It is only moved, not computed with.
    """
    count, width = tf.unstack(tf.shape(rows))
    even = tf.pad(tf.cast(rows, dtype), [[0, 0], [0, width % 2]])
    return tf.bitcast(tf.reshape(even, [count, -(-width // 2), 2]), tf.float32)


def _floats(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `_words`, except for the padding."""
    count, width = tf.unstack(tf.shape(words))
    return tf.cast(tf.reshape(tf.bitcast(words, dtype), [count, 2 * width]), tf.float32)


_EXTREMES = ("min", "max")


def to_ordered(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Converts a float32 or float64 tensor for "min" or "max"; returns others unchanged. float16 travels as float32.

    Example:
        >>> to_ordered(tf.constant([-1.0, -0.0, 0.0, 1.0, float("nan")]), "max").numpy().tolist()
        [-1065353217, -1, 0, 1065353216, 2147483647]
    """
    if op not in _EXTREMES or not tensor.dtype.is_floating:
        return tensor
    tensor = tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor
    integers = _flipped(tf.bitcast(tensor, tf.int32 if tensor.dtype == tf.float32 else tf.int64))
    wins = integers.dtype.max if op == "max" else integers.dtype.min
    return tf.where(tf.math.is_nan(tensor), tf.constant(wins, integers.dtype), integers)


def from_ordered(tensor: tf.Tensor, dtype: tf.DType, op: str) -> tf.Tensor:
    """Undoes `to_ordered`.

    Args:
        tensor: The integers.
        dtype: The dtype of the original.
        op: The reduction.

    Example:
        >>> from_ordered(to_ordered(tf.constant([-1.5, float("nan")]), "min"), tf.float32, "min").numpy().tolist()
        [-1.5, nan]
    """
    if op not in _EXTREMES or not dtype.is_floating:
        return tensor
    return tf.cast(tf.bitcast(_flipped(tensor), tf.float64 if dtype == tf.float64 else tf.float32), dtype)


def _flipped(integers: tf.Tensor) -> tf.Tensor:
    flipped = tf.bitwise.bitwise_xor(integers, tf.constant(integers.dtype.max, integers.dtype))
    return tf.where(integers < 0, flipped, integers)


def to_ordered_array(array: np.ndarray, op: str) -> np.ndarray:
    """Does the same as `to_ordered` for a host array.

    Example:
        >>> to_ordered_array(np.array([-0.0, 0.0], "float64"), "min").tolist()
        [-1, 0]
    """
    if op not in _EXTREMES or array.dtype.kind != "f":
        return array
    integers = _flipped_array(array.view(f"i{array.itemsize}"))
    limits = np.iinfo(integers.dtype)
    return np.where(np.isnan(array), limits.max if op == "max" else limits.min, integers)


def from_ordered_array(array: np.ndarray, dtype: np.dtype, op: str) -> np.ndarray:
    """Undoes `to_ordered_array`."""
    return _flipped_array(array).view(dtype) if op in _EXTREMES and dtype.kind == "f" else array


def _flipped_array(integers: np.ndarray) -> np.ndarray:
    return np.where(integers < 0, integers ^ np.iinfo(integers.dtype).max, integers)


_CHARACTERS = [bytes([i]) for i in range(256)]


def gather_rows(all_gather: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Gathers rows of any dtype that `all_gather` takes, or of strings.

    Args:
        all_gather: Concatenates numeric tensors of the members along the first dimension, in the order of members.
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
    """Returns the concatenated bytes of all strings.

    Example:
        >>> to_bytes(tf.constant(["a", "", "bc"])).numpy().tolist()
        [97, 98, 99]
    """
    return tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(strings, [-1])), tf.uint8)


def from_bytes(data: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Undoes `to_bytes`.

    Args:
        data: uint8, of shape `[sum(lengths)]`.
        lengths: The number of bytes of each string, of shape `[strings]`.

    Example:
        >>> from_bytes(tf.constant([97, 98, 99], tf.uint8), tf.constant([1, 0, 2])).numpy().tolist()
        [b'a', b'', b'bc']
    """
    characters = tf.gather(tf.constant(_CHARACTERS), tf.cast(data, tf.int32))
    owners = tf.repeat(tf.range(tf.size(lengths)), lengths)
    return tf.strings.unsorted_segment_join(characters, owners, tf.size(lengths))
