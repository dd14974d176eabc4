"""Batches that Python makes, for steps that are compiled once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


class PythonBatches:
    """Calls a function for each step, also where a compiled step runs again.

    TensorFlow calls a function of Python only while it compiles a step. What the function then returns would be a constant, the
    same in all steps. Operations, such as a queue's `dequeue`, run in each step anyway, and stay as they are.

    Args:
        make: The user's function. It returns a nest of tensors, arrays or numbers, of the same structure and dtypes each time.

    Example:
        >>> numbers = iter(range(10))
        >>> take = PythonBatches(lambda: next(numbers))
        >>> step = tf.function(lambda: take() * 2)
        >>> [int(step()), int(step())]
        [0, 2]
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: deque[Any] = deque()
        """What was made while a step was compiled, and belongs to the next ones."""

    def __call__(self) -> Any:
        """Returns the next batch: tensors."""
        batch = self._make()
        leaves = tf.nest.flatten(batch)
        if tf.executing_eagerly() or any(map(_is_of_graph, leaves)):
            return tf.nest.map_structure(tf.convert_to_tensor, batch)
        arrays = [_array(leaf) for leaf in leaves]
        self._made.append(batch)

        def following() -> list[np.ndarray]:
            found = self._made.popleft() if self._made else self._make()
            tf.nest.assert_same_structure(batch, found)
            return [_array(leaf, array) for leaf, array in zip(tf.nest.flatten(found), arrays, strict=True)]

        tensors = tf.numpy_function(following, [], [tf.as_dtype(array.dtype) for array in arrays])
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.set_shape([None, *array.shape[1:]] if array.ndim else [])  # Batches may have other numbers of rows.
        return tf.nest.pack_sequence_as(batch, tensors)


def _is_of_graph(leaf: Any) -> bool:
    """Whether a leaf is what an operation computes in each step, or a variable that is read there."""
    return isinstance(leaf, (tf.Variable, keras.Variable)) or tf.is_symbolic_tensor(leaf) and tf.get_static_value(leaf) is None


def _array(leaf: Any, like: np.ndarray | None = None) -> np.ndarray:
    """Returns a leaf as TensorFlow takes it: Python's numbers have 32 bits if these are enough, or as many as the first had."""
    array = np.asarray(tf.get_static_value(leaf) if tf.is_tensor(leaf) else leaf)
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        array = array.astype(np.float32)
    elif isinstance(leaf, int) and not isinstance(leaf, (bool, np.generic)) and -(2**31) <= leaf < 2**31:
        array = array.astype(np.int32 if like is None or like.dtype != np.int64 else np.int64)
    if like is not None and (tf.as_dtype(array.dtype), array.shape[1:]) != (tf.as_dtype(like.dtype), like.shape[1:]):
        what, hint = "A batch has another dtype, or other rows, than the first one.", "return a data set (`from_generator`)."
        raise ConfigurationError(message(what, hint, dtype=array.dtype, shape=array.shape, first=(like.dtype, like.shape)))
    return array
