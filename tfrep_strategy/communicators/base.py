"""The contract of a communicator: MPI's collectives on TensorFlow tensors, callable eagerly and in a `tf.function`."""

from __future__ import annotations

import abc
import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message

REDUCE_OPS = ("sum", "mean", "min", "max", "product")

# What the transports reduce is float16, float32, float64, int32 and int64; the other numbers travel as one of these.
_CARRIERS = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
             tf.uint32: tf.int64, tf.uint64: tf.int64, tf.bfloat16: tf.float32}  # fmt: skip


def carry(tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
    """Casts a tensor to a dtype that every transport reduces, such that `op` on it is `op` on the original.

    Example:
        >>> carry(tf.constant([200], tf.uint8)).dtype.name
        'int32'
    """
    if tensor.dtype != tf.uint64:
        return tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype))
    # Sums and products agree modulo 2**64; for comparisons the order has to be kept.
    return tf.bitcast(_flip_sign_bit(tensor) if op in ("min", "max") else tensor, tf.int64)


def uncarry(tensor: tf.Tensor, dtype: tf.DType, op: str = "sum") -> tf.Tensor:
    """Undoes `carry`.

    Example:
        >>> uncarry(carry(tf.constant([7], tf.uint64), "max"), tf.uint64, "max").numpy().tolist()
        [7]
    """
    if dtype != tf.uint64:
        return tf.cast(tensor, dtype)
    tensor = tf.bitcast(tensor, tf.uint64)
    return _flip_sign_bit(tensor) if op in ("min", "max") else tensor


def _flip_sign_bit(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(tensor, tf.constant(2**63, tf.uint64))


@contextlib.contextmanager
def outside_xla() -> Iterator[None]:
    """Keeps the operations of a collective out of what XLA compiles of a step.

    A transport has no XLA kernels. And a sum that is compiled together with the update that follows it is rounded otherwise
    than one which arrives from another replica, so that replicas would come apart bit by bit.
    """
    eager = tf.executing_eagerly()
    with contextlib.nullcontext() if eager else tf.xla.experimental.jit_scope(compile_ops=False):
        yield


def mean_of_sum(total: tf.Tensor, size: int) -> tf.Tensor:
    """Divides a sum over replicas by their number; integers are rounded towards zero, as `tf.reduce_mean` does.

    Example:
        >>> mean_of_sum(tf.constant([7, -7]), 2).numpy().tolist()
        [3, -3]
    """
    divisor = tf.cast(size, total.dtype)
    return tf.truncatediv(total, divisor) if total.dtype.is_integer else total / divisor


class Communicator(abc.ABC):
    """Talks to the other processes of a run; one object per process.

    Subclass it to bring your own transport: give `rank`, `size`, `local_rank`, `local_size`, and the five methods that
    are abstract here. All ranks call the same methods in the same order with tensors of the same dtype and, but for
    `all_gather` and `all_to_all`, the same shape. Methods take and return tensors, also symbolic ones inside a
    `tf.function`; they need no gradient.

    Example:
        >>> from tfrep_strategy.communicators import SingleCommunicator
        >>> SingleCommunicator().all_reduce([tf.constant([1.0, 2.0])], "sum")[0].numpy().tolist()
        [1.0, 2.0]
    """

    name = "custom"
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    bucket_bytes: int = 32 << 20
    """In groups of about how many bytes gradients travel best, where nothing else is asked for."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over all ranks.

        Args:
            tensors: Dense numeric tensors. They are given as one list so that the transport can fuse them.
            op: One of `REDUCE_OPS`.

        Returns:
            The reduced tensors, equal on every rank, in the order, shapes and dtypes given.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the ranks' tensors along their first dimension, which may differ, in rank order.

        Args:
            tensor: A dense tensor of rank one or more, of any numeric dtype or bool.

        Returns:
            A tensor of shape `[sum of first dimensions, ...]`, equal on every rank.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Returns rank `root`'s tensors on every rank. The other ranks pass tensors of the same shapes and dtypes."""

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows of `tensor` to rank r, for each r.

        Args:
            tensor: Of shape `[sum(splits), ...]`.
            splits: int32, of shape `[size]`.

        Returns:
            The rows received, in rank order, and how many came from each rank (int32, shape `[size]`).
        """

    @abc.abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of some of the ranks. All ranks call this; those outside get None."""

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """Reduces over ranks and leaves rank r with the r-th of `size` parts along the first dimension.

        The first `dim % size` parts are one row longer when it does not divide.
        """
        reduced = self.all_reduce([tensor], op)[0]
        rows = tf.shape(reduced)[0]
        base, longer = rows // self.size, rows % self.size
        start = self.rank * base + tf.minimum(self.rank, longer)
        return reduced[start : start + base + tf.cast(self.rank < longer, tf.int32)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_reduce([tf.zeros([1])], "sum")

    def abort(self, reason: str) -> None:  # noqa: B027
        """Makes collectives fail that are under way or come later; called in a thread when they could only wait.

        It is called again while what was under way has not ended, and after some seconds the process is ended.

        A transport that cannot do that leaves them to its own time limit.

        Args:
            reason: Goes into the message of the error.
        """

    def close(self) -> None:  # noqa: B027
        """Ends the communication. Nothing else may be called afterwards."""

    # Objects, for what happens once per run rather than once per step.

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers one picklable Python object of each rank, in rank order. Not for use inside a `tf.function`."""
        data = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8)
        sizes = self.all_gather(tf.constant([len(data)], tf.int64)).numpy()
        gathered = self.all_gather(tf.constant(data)).numpy()
        return [pickle.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(sizes)[:-1])]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns rank `root`'s picklable Python object on every rank. Not for use inside a `tf.function`."""
        self.check_root(root)
        data = np.frombuffer(cloudpickle.dumps(value) if self.rank == root else b"", dtype=np.uint8)
        return pickle.loads(self.all_gather(tf.constant(data)).numpy().tobytes())

    # Checks that implementations share.

    def check_op(self, op: str) -> None:
        """Raises a ConfigurationError for an unknown reduction."""
        if op not in REDUCE_OPS:
            raise ConfigurationError(message("Unknown reduction.", hint=f"use one of {REDUCE_OPS}.", op=op))

    def check_root(self, root: int) -> None:
        """Raises a ConfigurationError when no such rank exists."""
        if not 0 <= root < self.size:
            raise ConfigurationError(message("No such rank.", hint=f"ranks are 0 to {self.size - 1}.", root=root))

    def check_group(self, ranks: Sequence[int]) -> list[int]:
        """Returns the sorted ranks of a group; raises a ConfigurationError unless they exist and differ."""
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ConfigurationError(
                message("A group needs different existing ranks.", hint=f"ranks are 0 to {self.size - 1}.", ranks=ranks)
            )
        return sorted(ranks)
