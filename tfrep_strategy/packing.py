"""Concatenates many tensors to few flat ones, so that one operation does the work of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Packed:
    """Tensors that are concatenated to one flat tensor for each dtype.

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
