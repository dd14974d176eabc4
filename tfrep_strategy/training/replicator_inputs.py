"""Input functions: calls them with their context, and passes the batches of their pipelines, or of Python, to the replicas."""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.core.step import Shards
from tfrep_strategy.data.batches import all_alike, num_examples
from tfrep_strategy.data.distributed_iterator import Reading, ReplicaIterator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.base import SynchronousStrategy


class PythonBatches:
    """Calls a function for each step, even if the step is compiled.

    TensorFlow calls a Python function only while it compiles a step. Its result would be a constant, equal
    in all steps. Operations, such as a queue's `dequeue`, run in each step anyway, and stay as they are.

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
        """Batches that were made while a step was compiled, for the next steps."""

    def __call__(self) -> Any:
        """Returns the next batch as tensors."""
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
    """Returns whether a leaf is computed by an operation in each step, or a variable that is read there."""
    return isinstance(leaf, (tf.Variable, keras.Variable)) or tf.is_symbolic_tensor(leaf) and tf.get_static_value(leaf) is None


def _array(leaf: Any, like: np.ndarray | None = None) -> np.ndarray:
    """Converts a leaf to an array. Python numbers get 32 bits if these suffice, or the dtype of the first batch."""
    array = np.asarray(tf.get_static_value(leaf) if tf.is_tensor(leaf) else leaf)
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        array = array.astype(np.float32)
    elif isinstance(leaf, int) and not isinstance(leaf, (bool, np.generic)) and -(2**31) <= leaf < 2**31:
        array = array.astype(np.int32 if like is None or like.dtype != np.int64 else np.int64)
    if like is not None and (tf.as_dtype(array.dtype), array.shape[1:]) != (tf.as_dtype(like.dtype), like.shape[1:]):
        what, hint = "A batch has another dtype, or other rows, than the first one.", "return a data set (`from_generator`)."
        raise ConfigurationError(message(what, hint, dtype=array.dtype, shape=array.shape, first=(like.dtype, like.shape)))
    return array


InputFn = Callable[..., Any]


class InputReplicationMode(enum.Enum):
    """The number of calls of an input function, and the replicas that read its pipeline.

    In all modes an element of a pipeline is a per-replica batch.
    """

    SINGLE = "single"
    """One pipeline, whose elements go to the replicas in turn. Each process reads the whole pipeline and keeps the elements
    of its replicas, so the pipeline must give the same elements in every process."""
    PER_WORKER = "per_worker"
    """One pipeline in each process."""
    PER_REPLICA = "per_replica"
    """One pipeline for each replica."""


class InputContext(tf.distribute.InputContext):
    """The context of an input function: `num_replicas_in_sync`, `input_pipeline_id` and `num_input_pipelines`.

    Example:
        >>> InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divides the global batch size by the number of replicas.

        Args:
            global_batch_size: The number of examples in a step of all replicas.

        Returns:
            The number of examples in a step of one replica.

        Raises:
            ConfigurationError: The global batch size is not a multiple of the number of replicas.

        Example:
            >>> InputContext(1, 0, 2).get_per_replica_batch_size(32)
            16
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigurationError(
                message(
                    "The global batch size is not a multiple of the number of replicas.",
                    hint=f"use a multiple of {self.num_replicas_in_sync}.",
                    global_batch_size=global_batch_size,
                    num_replicas_in_sync=self.num_replicas_in_sync,
                    input_pipeline_id=self.input_pipeline_id,
                )
            )
        return global_batch_size // self.num_replicas_in_sync


def call_input(input_fn: InputFn, context: Any) -> Any:
    """Calls an input function with its context, or without one if it takes none."""
    try:
        takes_context = bool(inspect.signature(input_fn).parameters)
    except ValueError:  # A builtin has no signature.
        takes_context = True
    return input_fn(context) if takes_context else input_fn()


def per_pipeline(strategy: tf.distribute.Strategy, mode: InputReplicationMode, input_fn: InputFn) -> Any:
    """Makes a distributed data set with TensorFlow's functions, for strategies that do not cut batches themselves.

    Raises:
        ConfigurationError: The input function does not return a data set.
    """

    def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
        process = _Process(context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync)
        made = process.call(mode, input_fn)
        if not all(isinstance(m, tf.data.Dataset) for m in made):
            raise ConfigurationError(
                message(
                    "Under this strategy an input function must return a tf.data.Dataset.",
                    hint="wrap a callable: tf.data.Dataset.from_generator(make_batches, output_signature=...).",
                    strategy=type(strategy).__name__,
                    returned=type(made[0]).__name__,
                )
            )
        return process.joined(mode, made)

    return strategy.distribute_datasets_from_function(dataset_of)


class _Process(NamedTuple):
    """The process that calls an input function.

    Attributes:
        rank: Rank of the process.
        size: Number of processes.
        total: Number of replicas of all processes.
    """

    rank: int
    size: int
    total: int

    @property
    def replicas(self) -> range:
        """The replicas of this process."""
        count = self.total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def call(self, mode: InputReplicationMode, input_fn: InputFn) -> list[Any]:
        """Calls an input function once for each pipeline of this process."""
        places = {
            InputReplicationMode.SINGLE: [(1, 0)],
            InputReplicationMode.PER_WORKER: [(self.size, self.rank)],
            InputReplicationMode.PER_REPLICA: [(self.total, replica) for replica in self.replicas],
        }[mode]
        return [call_input(input_fn, InputContext(n, i, self.total)) for n, i in places]

    def joined(self, mode: InputReplicationMode, made: list[tf.data.Dataset]) -> tf.data.Dataset:
        """Joins the pipelines to one data set, whose elements go to the replicas of this process in turn."""
        if mode == InputReplicationMode.SINGLE and self.size > 1:
            made = [made[0].shard(self.total, replica) for replica in self.replicas]
        if len(made) == 1:
            return made[0]
        return tf.data.Dataset.choose_from_datasets(made, tf.data.Dataset.range(len(made)).repeat())

    def take(self, mode: InputReplicationMode, made: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
        """Takes a batch for each replica of this process."""
        if mode == InputReplicationMode.SINGLE:
            taken = [made[0]() for _ in range(self.total)]
            own = [taken[replica] for replica in self.replicas]
        else:
            own = [made[i % len(made)]() for i in range(len(self.replicas))]
        return tuple(own)


def no_input(strategy: SynchronousStrategy) -> Shards:
    """Returns the input of replicas whose step takes no batch. All replicas have the same share."""
    _, devices, _ = strategy.extended.local_replicas(stop_together=True)
    total = tf.constant(strategy.num_replicas_in_sync, tf.int64)
    return Shards(tuple(tf.zeros([1]) for _ in devices), total, tf.constant(True))


def make_input(strategy: tf.distribute.Strategy, mode: InputReplicationMode, input_fn: InputFn) -> Any:
    """Calls an input function once for each pipeline of this process.

    Args:
        strategy: The strategy whose replicas read.
        mode: The number of calls of the input function.
        input_fn: Returns a `tf.data.Dataset` of per-replica batches, or a callable that returns such a batch in each step.

    Returns:
        An iterator of steps, or a function that returns the `Shards` of the next step.

    Raises:
        ConfigurationError: The input function returns another type.
    """
    if not isinstance(strategy, SynchronousStrategy):
        return iter(per_pipeline(strategy, mode, input_fn))
    _, devices, agreement = strategy.extended.local_replicas(stop_together=True)
    process = _Process(agreement.rank, agreement.size, strategy.num_replicas_in_sync)
    made = process.call(mode, input_fn)
    if all(isinstance(m, tf.data.Dataset) for m in made):
        dataset = process.joined(mode, made)
        return ReplicaIterator((iter(dataset),), Reading(devices, agreement, as_shards=True))
    if all(callable(m) for m in made):
        functions = [PythonBatches(m) for m in made]

        def batches() -> Shards:
            parts = process.take(mode, functions)
            rows = tf.add_n([num_examples(part) for part in parts])
            no_sizes = tf.zeros([0], tf.int64)
            total, _, alike, _ = agreement.next_step(tf.constant(True), rows, all_alike(parts), no_sizes)
            return Shards(parts, total, alike)

        return batches
    raise ConfigurationError(
        message(
            "An input function must return a tf.data.Dataset, or a callable that returns a nest of tensors.",
            hint="return one of these on every replica.",
            returned=[type(m).__name__ for m in made],
            first_replica=process.replicas[0],
        )
    )
