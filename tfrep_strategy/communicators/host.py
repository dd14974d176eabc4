"""A base for transports whose collectives are Python calls on arrays in the memory of the host."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator, carry, outside_xla, uncarry
from tfrep_strategy.communicators.order import Order
from tfrep_strategy.errors import ConfigurationError, DesyncError, PeerError, message
from tfrep_strategy.profiles.times import HOST_COLLECTIVE

Arrays = list[np.ndarray]


class HostCommunicator(Communicator):
    """Adds operations that call Python on the CPU. Tensors of a GPU are copied.

    A subclass implements the methods on arrays, which get contiguous ones and must not write to them. Collectives of a function
    run in program order, unused ones too.
    """

    @abc.abstractmethod
    def reduce_arrays(self, arrays: Arrays, op: str) -> Arrays:
        """Reduces arrays over the ranks. They are of no dtype of one or two bytes. For "mean" it returns the sum."""

    @abc.abstractmethod
    def gather_array(self, array: np.ndarray) -> np.ndarray:
        """Concatenates the ranks' arrays of any numeric dtype or bool along the first dimension, which may differ between ranks."""

    @abc.abstractmethod
    def broadcast_arrays(self, arrays: Arrays, root: int) -> Arrays:
        """Returns the root's arrays of any numeric dtype or bool."""

    @abc.abstractmethod
    def scatter_array(self, array: np.ndarray, rows: Sequence[int], op: str) -> np.ndarray:
        """Reduces an array as `reduce_arrays` does, and returns the own rows. Rank r gets the next `rows[r]`."""

    @abc.abstractmethod
    def exchange_rows(self, array: np.ndarray, splits: np.ndarray) -> Arrays:
        """Sends `splits[r]` rows (int32), all in all, to rank r. Returns the received rows, and how many came from each (int32)."""

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
                raise ConfigurationError(message("The splits are not all rows.", hint, rows=len(rows), splits=counts.tolist()))
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
            talk: Gets the arrays of `tensors`, and returns as many of the same dtypes.
            tensors: What is sent.
        """
        if not tensors:
            return []
        if tf.executing_eagerly():
            try:
                return [tf.convert_to_tensor(result) for result in talk([_array(tensor) for tensor in tensors])]
            except DesyncError:
                raise
            except PeerError as error:  # The monitor knows which rank ended, and explains TensorFlow's errors.
                raise tf.errors.UnavailableError(None, None, str(error)) from error
        with outside_xla(), tf.device("CPU:0"):
            dtypes = [tensor.dtype for tensor in tensors]
            operation = lambda *arrays: talk([_array(array) for array in arrays])  # noqa: E731
            # TensorFlow keeps calls of Python in program order, but not a branch or a loop that has some and uses variables.
            order = Order.of("CPU:0")
            with tf.control_dependencies([order.mark()]):
                results = tf.nest.flatten(tf.numpy_function(operation, tensors, dtypes, name=HOST_COLLECTIVE))
            with tf.control_dependencies(results):
                order.mark()
            return results


def _carried(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Returns what travels in a reduction. A sum in 16 bits would round after each addition."""
    return carry(tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor, op)


def _array(value: Any) -> np.ndarray:
    """Returns the elements, without a copy if they are in the memory of the host."""
    return np.asarray(value, order="C")
