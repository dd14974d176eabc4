"""Shards of variables: the part of each replica, and the conversion between tensors and parts.

In ZeRO-1 (Rajbhandari et al., arXiv:1910.02054), each replica updates only its part of the weights, and so needs only its part of
the optimizer's state.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.gradients import buckets

Communicator = Any  # communicators.Communicator, of a higher room

_MOST_PADDING = 1.01
"""Rows are kept whole if this makes the parts at most this much larger."""


class Cut(abc.ABC):
    """The division of a tensor into the parts of the replicas.

    Args:
        shape: The shape of the whole tensor, which is fully known.
        size: The number of replicas.

    Attributes:
        part_shape: The shape of a part.
    """

    part_shape: tf.TensorShape

    def __init__(self, shape: Any, size: int) -> None:
        self.shape = tf.TensorShape(shape)
        self.size, self.is_whole_where_read = size, False

    @abc.abstractmethod
    def part(self, whole: Any, rank: int) -> Any:
        """Returns a replica's part of a tensor, or of `tf.IndexedSlices`."""

    @abc.abstractmethod
    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the whole tensor, given the parts of all replicas in order."""

    @abc.abstractmethod
    def gathered(self, part: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        """Returns the whole tensor, given this replica's part. All replicas call it."""


class Even(Cut):
    """Parts of equal size for all replicas, padded with zeros at the end.

    A part has whole rows of a tensor if these divide well. Otherwise the tensor is cut between any two elements.

    Args:
        shape: The shape of the whole tensor, which is fully known.
        size: The number of replicas.
        is_whole_where_read: Whether a step reads a variable of these parts as a whole.

    Example:
        >>> cut = Even([3], 2)
        >>> [cut.part(tf.constant([1, 2, 3]), rank).numpy().tolist() for rank in range(2)]
        [[1, 2], [3, 0]]
        >>> cut.joined([tf.constant([1, 2]), tf.constant([3, 0])]).numpy().tolist()
        [1, 2, 3]
    """

    def __init__(self, shape: Any, size: int, is_whole_where_read: bool = False) -> None:
        super().__init__(shape, size)
        self.is_whole_where_read = is_whole_where_read
        dimensions = self.shape.as_list()
        elements = math.prod(dimensions)
        rows = dimensions[0] if dimensions else 1
        by_rows = elements > 0 and size * -(-rows // size) <= _MOST_PADDING * rows
        item = dimensions[1:] if by_rows else []
        self._units = rows if by_rows else elements
        self._width = -(-self._units // size)
        self.part_shape = tf.TensorShape([self._width, *item])

    def part(self, whole: Any, rank: int) -> Any:
        start = rank * self._width
        if isinstance(whole, tf.IndexedSlices):
            return self._part_of_slices(whole, start)
        units = tf.reshape(whole, [self._units, *self.part_shape[1:]])[start : start + self._width]
        return _padded(units, self._width)

    def _part_of_slices(self, slices: tf.IndexedSlices, start: int) -> tf.IndexedSlices:
        item = self.part_shape[1:].as_list()
        units_of_slice = math.prod(self.shape[1:].as_list()) // math.prod(item)
        each = tf.range(units_of_slice, dtype=slices.indices.dtype)
        units = tf.reshape(slices.indices[:, tf.newaxis] * units_of_slice + each, [-1])
        is_own = (units >= start) & (units < start + self._width)
        values = tf.boolean_mask(tf.reshape(slices.values, [-1, *item]), is_own)
        return tf.IndexedSlices(values, tf.boolean_mask(units, is_own) - start, tf.constant(self.part_shape.as_list(), tf.int64))

    def rows(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns the parts of all replicas, of shape `[size, elements of a part]`."""
        flat = tf.reshape(whole, [self.shape.num_elements()])  # The static shape of a gradient may be unknown.
        return tf.reshape(_padded(flat, self.size * self.part_shape.num_elements()), [self.size, -1])

    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
        return tf.reshape(flat[: self.shape.num_elements()], self.shape)

    def gathered(self, part: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        return self.joined([communicator.all_gather_equal(part)])


class Along(Cut):
    """Equal parts along one or two axes, on a mesh of replicas.

    Args:
        shape: The shape of the tensor.
        mesh: The sizes of the axes of the mesh: the number of groups of replicas, and the number of replicas in each. Replicas of a
            group are consecutive.
        axes: The axis of the tensor that is cut along each axis of the mesh; None if all replicas along it hold the same. The size
            of the mesh's axis divides it.

    Example:
        >>> [Along([1, 4], (1, 2), (None, 1)).part(tf.constant([[1, 2, 3, 4]]), rank).numpy().tolist() for rank in range(2)]
        [[[1, 2]], [[3, 4]]]
    """

    def __init__(self, shape: Any, mesh: tuple[int, int], axes: tuple[int | None, int | None]) -> None:
        super().__init__(shape, mesh[0] * mesh[1])
        self.mesh, self.axes = mesh, axes
        widths = self.shape.as_list()
        for size, axis in zip(mesh, axes, strict=True):
            if axis is not None:
                widths[axis] //= size
        self.part_shape = tf.TensorShape(widths)

    def begin(self, rank: int) -> list[int]:
        """Returns the indices at which a replica's part begins."""
        result = [0] * len(self.part_shape)
        for place, axis in zip(divmod(rank, self.mesh[1]), self.axes, strict=True):
            if axis is not None:
                result[axis] = place * self.part_shape[axis]
        return result

    def part(self, whole: Any, rank: int) -> Any:
        return tf.slice(tf.convert_to_tensor(whole), self.begin(rank), self.part_shape)

    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        (_, size), (across, within) = self.mesh, self.axes
        columns = [parts[place::size] for place in range(size)]
        joined = [column[0] if across is None else tf.concat(list(column), across) for column in columns]
        return joined[0] if within is None else tf.concat(joined, within)

    def gathered(self, part: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        return self.joined(tf.unstack(communicator.all_gather_equal(part[tf.newaxis]), self.size))


class Owned(Cut):
    """One replica holds the whole tensor, and the others hold nothing.

    Args:
        shape: The shape of the tensor.
        size: The number of replicas.
        owner: The replica that holds it.

    Example:
        >>> [Owned([2], 2, owner=1).part(tf.constant([1, 2]), rank).numpy().tolist() for rank in range(2)]
        [[], [1, 2]]
    """

    def __init__(self, shape: Any, size: int, owner: int) -> None:
        super().__init__(shape, size)
        self.owner, self.part_shape = owner, self.shape

    def part(self, whole: Any, rank: int) -> Any:
        return whole if rank == self.owner else tf.zeros([0], whole.dtype)

    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.identity(parts[self.owner])

    def gathered(self, part: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        own = part if communicator.rank == self.owner else tf.zeros(self.shape, part.dtype)
        return communicator.broadcast([own], self.owner)[0]


def owners(sizes: Sequence[int], size: int) -> list[int]:
    """Distributes variables so that all replicas hold about equally much: the largest first, each to the replica with the least.

    Args:
        sizes: The number of elements of each variable.
        size: The number of replicas.

    Returns:
        The owner of each variable.

    Example:
        >>> owners([5, 100, 60, 50], 2)
        [0, 0, 1, 1]
    """
    held, result = [0] * size, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        result[i] = held.index(min(held))
        held[result[i]] += sizes[i]
    return result


def gather_parts(
    cuts: Sequence[Even], parts: Sequence[tf.Tensor], communicator: Communicator, bucket_bytes: int
) -> list[tf.Tensor]:
    """Gathers whole tensors from the replicas' parts.

    Args:
        cuts: The division of each tensor.
        parts: This replica's part of each.
        communicator: Connects the replicas.
        bucket_bytes: Parts travel in buckets of about this many bytes over all replicas.

    Returns:
        The whole tensors, in the given order.
    """
    result: list[Any] = [None] * len(parts)
    for bucket in buckets(range(len(parts)), parts, -(-bucket_bytes // communicator.size)):
        own = tf.concat([tf.reshape(parts[i], [-1]) for i in bucket], 0)
        rows = tf.reshape(communicator.all_gather_equal(own), [communicator.size, -1])
        widths = [cuts[i].part_shape.num_elements() for i in bucket]
        for i, of_all in zip(bucket, tf.split(rows, widths, 1), strict=True):
            result[i] = cuts[i].joined([of_all])
    return result


def exchange_owned(owned_by: Sequence[int], tensors: Sequence[tf.Tensor], communicator: Communicator) -> list[tf.Tensor]:
    """Sends each tensor from its owner to all replicas.

    Args:
        owned_by: The owner of each tensor.
        tensors: The tensors, of fully known shapes. Only the shapes and dtypes of other owners' tensors are used.
        communicator: Connects the replicas.

    Returns:
        The tensors of the owners, in the given order.
    """
    result: list[Any] = [None] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        order = sorted((i for i, tensor in enumerate(tensors) if tensor.dtype == dtype), key=lambda i: owned_by[i])
        own = [tf.reshape(tensors[i], [-1]) for i in order if owned_by[i] == communicator.rank]
        of_all = communicator.all_gather(tf.concat([tf.zeros([0], dtype), *own], 0))
        pieces = tf.split(of_all, [tensors[i].shape.num_elements() for i in order])
        for i, piece in zip(order, pieces, strict=True):
            result[i] = tf.reshape(piece, tensors[i].shape)
    return result


def _padded(tensor: tf.Tensor, length: int) -> tf.Tensor:
    """Appends zeros along the first dimension."""
    missing = length - tensor.shape[0]
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)) if missing else tensor
