"""The contract of a communicator: MPI's collectives on TensorFlow tensors, in eager code and in a `tf.function`."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.flight_recorder import RECORDER
from tfrep_strategy.cluster.profiles.traces import HOST_COLLECTIVE
from tfrep_strategy.communicators.order import Order
from tfrep_strategy.core.calls import Call, line_of
from tfrep_strategy.core.validation import checked
from tfrep_strategy.errors import ConfigurationError, DesyncError, PeerError, is_count, message

REDUCE_OPS = ("sum", "mean", "min", "max", "product")

# Every transport reduces float16, float32, float64, int32 and int64. Other dtypes are sent as one of these.
_CARRIERS = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
             tf.uint32: tf.int64, tf.uint64: tf.int64, tf.bfloat16: tf.float32}  # fmt: skip


def carry(tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
    """Casts a real tensor to a dtype that every transport reduces, such that `op` on it is `op` on the original.

    Example:
        >>> carry(tf.constant([200], tf.uint8)).dtype.name
        'int32'
    """
    if tensor.dtype == tf.int32 and op == "mean":  # Its sum may overflow where the mean does not.
        return tf.cast(tensor, tf.int64)
    if tensor.dtype != tf.uint64:
        return tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype))
    # Sums and products are equal modulo 2**64. For min and max the cast must keep the order.
    return tf.bitcast(_flip_sign_bit(tensor) if op in ("min", "max") else tensor, tf.int64)


def uncarry(tensor: tf.Tensor, dtype: tf.DType, op: str = "sum", size: int = 1) -> tf.Tensor:
    """Undoes `carry`.

    Args:
        tensor: The result of the reduction. For "mean" it is the sum.
        dtype: The dtype of the original.
        op: The reduction.
        size: For "mean": the number of tensors that were added.

    Example:
        >>> uncarry(carry(tf.constant([7], tf.uint64), "max"), tf.uint64, "max").numpy().tolist()
        [7]
    """
    if dtype == tf.uint64:
        tensor = tf.bitcast(tensor, tf.uint64)
    if op == "mean":
        tensor = mean_of_sum(tensor, size)
    return _flip_sign_bit(tensor) if dtype == tf.uint64 and op in ("min", "max") else tf.cast(tensor, dtype)


_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64, 16: tf.int64}


def to_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a tensor as integers that every transport moves and sums. A complex128 becomes two of them.

    A sum of these integers with zeros keeps every bit. A sum of floats does not: -0.0 + 0.0 is 0.0, and TensorFlow flushes
    the smallest numbers to zero.

    Args:
        tensor: Of any numeric dtype or bool.

    Returns:
        An int32 or int64 tensor, of the same shape; for complex128 of shape `[..., 2]`.

    Example:
        >>> to_bits(tf.constant([1.0, -0.0], tf.float16)).numpy().tolist()
        [15360, -32768]
    """
    if tensor.dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    return carry(tf.bitcast(tensor, _BITS[tensor.dtype.size]))


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `to_bits`.

    Example:
        >>> from_bits(to_bits(tf.constant([1 + 2j])), tf.complex128).numpy().tolist()
        [(1+2j)]
    """
    if dtype.is_bool:
        return tf.cast(bits, tf.bool)
    return tf.bitcast(uncarry(bits, _BITS[dtype.size]), dtype)


def carry_moved(tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor that is moved, not reduced, to a dtype that every transport moves. It may be complex."""
    return to_bits(tensor) if tensor.dtype.is_complex else carry(tensor)


def uncarry_moved(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `carry_moved`."""
    return from_bits(tensor, dtype) if dtype.is_complex else uncarry(tensor, dtype)


def _flip_sign_bit(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(tensor, tf.constant(2**63, tf.uint64))


@contextlib.contextmanager
def outside_xla() -> Iterator[None]:
    """Excludes the operations of a collective from XLA's compilation of a step.

    Transports have no XLA kernels. Moreover, XLA could fuse a sum with a following update, and round differently on each
    replica. The replicas would then diverge, bit by bit.
    """
    eager = tf.executing_eagerly()
    with contextlib.nullcontext() if eager else tf.xla.experimental.jit_scope(compile_ops=False):
        yield


_WORD = 4
"""Bytes travel as int32: every transport moves these as they are, but some move a byte as four."""


def _to_words(data: bytes) -> tf.Tensor:
    """Returns bytes as an int32 vector, padded with zeros."""
    return tf.constant(np.frombuffer(data + bytes(-len(data) % _WORD), np.int32))


def mean_of_sum(total: tf.Tensor, size: int) -> tf.Tensor:
    """Divides a sum over replicas by their number. Integers are rounded towards zero, as in `tf.reduce_mean`.

    Example:
        >>> mean_of_sum(tf.constant([7, -7]), 2).numpy().tolist()
        [3, -3]
    """
    divisor = tf.cast(size, total.dtype)
    return tf.truncatediv(total, divisor) if total.dtype.is_integer else total / divisor


class Communicator(abc.ABC):
    """Runs collectives between the processes of a run; one object per process.

    Subclass it to add a transport: set `rank` and `size` (on several machines also `local_rank` and `local_size`), and
    implement the three abstract methods. The other methods have exact defaults. Override one if the transport
    has a faster way. All ranks call the same methods in the same order, with tensors of the same dtype and shape; only
    `all_gather` and `all_to_all` allow another first dimension. Methods take and return tensors, eager or symbolic. They
    need no gradient. `tfrep.register_communicator` gives a transport a name.

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
    """The size of a gradient bucket in bytes, if the user sets none."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over all ranks.

        Args:
            tensors: Dense numeric tensors. They come as one list so that the transport can fuse them.
            op: One of `REDUCE_OPS`.

        Returns:
            The reduced tensors, equal on every rank, in the given order, shapes and dtypes.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the ranks' tensors along the first dimension, in rank order. Its size may differ between ranks.

        Args:
            tensor: A dense tensor of rank one or more, of any numeric dtype or bool.

        Returns:
            A tensor of shape `[sum of first dimensions, ...]`, equal on every rank.
        """

    @abc.abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of some ranks. All ranks must call it; a rank outside the group gets None.

        A transport without groups raises a ConfigurationError. Everything but `strategy.new_group` works without them.
        """

    # Methods with defaults.

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Returns rank `root`'s tensors on every rank, bit by bit.

        The default sums the bits with zeros of the other ranks.

        Args:
            tensors: Dense tensors of any numeric dtype or bool, of the same shapes and dtypes on all ranks.
            root: The rank whose tensors are sent.

        Returns:
            The tensors of the root, in the given order.
        """
        self.check_root(root)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        is_root = tf.equal(self.rank, root)
        sent = [tf.where(is_root, bits, tf.zeros_like(bits)) for bits in map(to_bits, tensors)]
        return [from_bits(bits, t.dtype) for bits, t in zip(self.all_reduce(sent, "sum"), tensors, strict=True)]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows of `tensor` to rank r, for each r.

        The default gathers the rows of all ranks and keeps its own.

        Args:
            tensor: Of shape `[sum(splits), ...]`.
            splits: int32, of shape `[size]`.

        Returns:
            The received rows, in rank order, and the number of rows from each rank (int32, shape `[size]`).
        """
        tensor = tf.convert_to_tensor(tensor)
        table = tf.reshape(self.all_gather(tf.cast(splits, tf.int32)), [self.size, self.size])
        receivers = tf.repeat(tf.tile(tf.range(self.size), [self.size]), tf.reshape(table, [-1]))
        rows = tf.boolean_mask(self.all_gather(tensor), tf.equal(receivers, self.rank))
        return tf.ensure_shape(rows, [None, *tensor.shape[1:]]), table[:, self.rank]

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """Reduces over the ranks, and gives rank r the r-th of `size` parts along the first dimension.

        If the rows do not divide, the first `rows % size` parts are one row longer.
        """
        reduced = self.all_reduce([tensor], op)[0]
        rows = tf.shape(reduced)[0]
        base, longer = rows // self.size, rows % self.size
        start = self.rank * base + tf.minimum(self.rank, longer)
        return reduced[start : start + base + tf.cast(self.rank < longer, tf.int32)]

    def all_gather_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        """Does the same as `all_gather`, for tensors of one shape on all ranks. This saves an exchange of sizes.

        Args:
            tensor: A dense tensor of rank one or more, of any numeric dtype or bool.

        Returns:
            A tensor of shape `[size * first dimension, ...]`, equal on every rank.
        """
        return self.all_gather(tensor)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_reduce([tf.zeros([1])], "sum")

    def note_call(self, what: str) -> None:  # noqa: B027
        """Reports to other ranks that this rank calls a function now. It does not wait for them.

        Args:
            what: The function and its shapes, equal on all ranks.

        Raises:
            DesyncError: Ranks have called different functions before. Only communicators that know the other ranks' calls raise it.
        """

    def check_program(  # noqa: B027
        self, name: str, digest: bytes, lines: Callable[[], Sequence[tuple[str, str]]]
    ) -> None:
        """Refuses a program that differs from that of other ranks, before it runs. It does not wait for ranks without such a
        program.

        Args:
            name: Its name, equal on all ranks.
            digest: A digest that is equal for equal programs.
            lines: Returns, for each line of the program, a text that must be equal, and a description for the error. It is called
                if the digests differ.

        Raises:
            DesyncError: The programs differ. Only communicators that know the other ranks' calls raise it.
        """

    def abort(self, reason: str) -> None:  # noqa: B027
        """Makes running and later collectives fail. The monitor calls it, in a thread, when they would wait forever.

        It is called again while a running collective has not ended. After some seconds the process is ended.
        A transport that cannot abort does nothing, and relies on its own time limit.

        Args:
            reason: Part of the error message.
        """

    def close(self) -> None:  # noqa: B027
        """Ends the communication. No other method may be called afterwards."""

    # Collectives of Python objects, which are used once per run, not once per step.

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers one picklable Python object of each rank, in rank order. Not for use inside a `tf.function`.

        The ranks compare sizes and digests first. If all objects are equal, as is usual, nothing else is sent.
        """
        data = cloudpickle.dumps(value)
        digest = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int64)
        headers = self.all_gather_equal(tf.constant([[len(data), *digest]], tf.int64)).numpy()
        if (headers == headers[0]).all():
            return [pickle.loads(data) for _ in range(self.size)]
        words = [-(-size // _WORD) for size in headers[:, 0].tolist()]
        parts = np.split(self._gather_words(_to_words(data), words).numpy(), np.cumsum(words)[:-1])
        return [pickle.loads(part.tobytes()[:size]) for part, size in zip(parts, headers[:, 0].tolist(), strict=True)]

    def _gather_words(self, words: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Does the same as `all_gather` for an int32 vector, if each rank knows the length of each vector."""
        return self.all_gather(words)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns rank `root`'s picklable Python object on every rank. Not for use inside a `tf.function`."""
        self.check_root(root)
        data = cloudpickle.dumps(value) if self.rank == root else b""
        size = int(self.broadcast([tf.constant(len(data), tf.int64)], root)[0])
        words = _to_words(data) if self.rank == root else tf.zeros([-(-size // _WORD)], tf.int32)
        return pickle.loads(self.broadcast([words], root)[0].numpy().tobytes()[:size])

    # Checks that implementations share.

    def check_op(self, op: str) -> None:
        """Raises a ConfigurationError for an unknown reduction."""
        if op not in REDUCE_OPS:
            raise ConfigurationError(message("Unknown reduction.", hint=f"use one of {REDUCE_OPS}.", op=op))

    def check_root(self, root: int) -> None:
        """Raises a ConfigurationError if the root is not a rank."""
        if not is_count(root, 0, self.size - 1):
            raise ConfigurationError(message("No such rank.", hint=f"ranks are 0 to {self.size - 1}.", root=root))

    def check_group(self, ranks: Sequence[int]) -> list[int]:
        """Returns the sorted ranks of a group; raises a ConfigurationError if a rank does not exist or is given twice."""
        ranks = checked(list[Any], "ranks", ranks, hint=f"ranks are 0 to {self.size - 1}.")
        if not ranks or not all(is_count(rank, 0, self.size - 1) for rank in ranks) or len(set(ranks)) != len(ranks):
            raise ConfigurationError(
                message("A group needs distinct, existing ranks.", hint=f"ranks are 0 to {self.size - 1}.", ranks=ranks)
            )
        return sorted(ranks)


class SingleCommunicator(Communicator):
    """Rank 0 of 1: every collective returns its argument."""

    name = "single"
    rank, size = 0, 1

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        return [tf.convert_to_tensor(t) for t in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(tensor)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        return [tf.convert_to_tensor(t) for t in tensors]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.identity(tensor), tf.identity(tf.cast(splits, tf.int32))

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self.check_group(ranks)
        return self


Arrays = list[np.ndarray]


class HostCommunicator(Communicator):
    """Adds operations that call Python on the CPU. Tensors of a GPU are copied.

    A subclass implements the methods on arrays. These are contiguous and must not be written to. Collectives of a function
    run in program order, unused ones too.

    Attributes:
        group: The ranks of the run that take part, for the record of collectives; none if they are not known.
    """

    group: Sequence[int] = ()

    @abc.abstractmethod
    def reduce_arrays(self, arrays: Arrays, op: str) -> Arrays:
        """Reduces arrays over the ranks. Their dtypes have at least four bytes. For "mean" it returns the sum."""

    @abc.abstractmethod
    def gather_array(self, array: np.ndarray) -> np.ndarray:
        """Concatenates the ranks' arrays of any numeric dtype or bool along the first dimension, which may differ between ranks."""

    @abc.abstractmethod
    def broadcast_arrays(self, arrays: Arrays, root: int) -> Arrays:
        """Returns the root's arrays of any numeric dtype or bool."""

    @abc.abstractmethod
    def scatter_array(self, array: np.ndarray, rows: Sequence[int], op: str) -> np.ndarray:
        """Reduces an array like `reduce_arrays`, and returns this rank's rows. Rank r gets the next `rows[r]`."""

    @abc.abstractmethod
    def exchange_rows(self, array: np.ndarray, splits: np.ndarray) -> Arrays:
        """Sends the next `splits[r]` rows (int32) to each rank r. Returns the received rows and their number by rank (int32)."""

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        carried = [_carried(tensor, op) for tensor in tensors]
        reduced = self._call("all_reduce", op, lambda arrays: self.reduce_arrays(arrays, op), carried)
        results = []
        for tensor, carrier in zip(tensors, reduced, strict=True):
            results.append(tf.ensure_shape(uncarry(carrier, tensor.dtype, op, self.size), tensor.shape))
        return results

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        (gathered,) = self._call("all_gather", "", lambda arrays: [self.gather_array(*arrays)], [tensor])
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        self.check_op(op)
        tensor = tf.convert_to_tensor(tensor)

        def scatter(arrays: Arrays) -> Arrays:
            base, longer = divmod(len(arrays[0]), self.size)
            return [self.scatter_array(arrays[0], [base + (rank < longer) for rank in range(self.size)], op)]

        (own,) = self._call("reduce_scatter", op, scatter, [_carried(tensor, op)])
        return tf.ensure_shape(uncarry(own, tensor.dtype, op, self.size), [None, *tensor.shape[1:]])

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensors = [tf.convert_to_tensor(tensor), tf.cast(splits, tf.int32)]

        def exchange(arrays: Arrays) -> Arrays:
            rows, counts = arrays
            if counts.sum() != len(rows):
                hint = "let the splits add up to the number of rows."
                raise ConfigurationError(
                    message("The splits do not add up to the number of rows.", hint, rows=len(rows), splits=counts.tolist())
                )
            return self.exchange_rows(rows, counts)

        rows, counts = self._call("all_to_all", "", exchange, tensors)
        return tf.ensure_shape(rows, [None, *tensors[0].shape[1:]]), tf.ensure_shape(counts, [self.size])

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        received = self._call("broadcast", f"root={root}", lambda arrays: self.broadcast_arrays(arrays, root), tensors)
        return [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(received, tensors, strict=True)]

    def _call(self, kind: str, option: str, talk: Callable[[Arrays], Arrays], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds an operation that talks to the other ranks.

        Args:
            kind: Name of the collective.
            option: An argument of it that must be equal on all ranks.
            talk: Gets the arrays of `tensors`, and returns equally many of the same dtypes.
            tensors: The tensors to send.
        """
        if not tensors:
            return []
        if tf.executing_eagerly():
            try:
                return [tf.convert_to_tensor(result) for result in talk([_array(tensor) for tensor in tensors])]
            except DesyncError:
                raise
            except PeerError as error:  # The monitor knows the rank that ended, and explains TensorFlow's errors.
                raise tf.errors.UnavailableError(None, None, str(error)) from error
        with outside_xla(), tf.device("CPU:0"):
            dtypes = [tensor.dtype for tensor in tensors]
            # TensorFlow keeps calls of Python in program order, except in a branch or loop that also uses variables.
            order = Order.of("CPU:0")
            mark = order.mark()
            line, names = line_of(mark), [dtype.name for dtype in dtypes]

            def operation(*arrays: Any) -> Arrays:
                given = [_array(array) for array in arrays]
                tensors = tuple(zip(names, [array.shape for array in given], strict=True))
                with RECORDER.collective(self.group, Call(kind, option, tensors, line)):
                    return talk(given)

            with tf.control_dependencies([mark]):
                results = tf.nest.flatten(tf.numpy_function(operation, tensors, dtypes, name=HOST_COLLECTIVE))
            with tf.control_dependencies(results):
                order.mark()
            return results


def _carried(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Returns the tensor for a reduction. A sum in 16 bits would round after each addition."""
    return carry(tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor, op)


def _array(value: Any) -> np.ndarray:
    """Returns the elements, without a copy if they are in host memory."""
    return np.asarray(value, order="C")
