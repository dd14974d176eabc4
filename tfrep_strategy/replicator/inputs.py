"""What an input function is told, and how its pipelines become what replicas read."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.batches import num_examples
from tfrep_strategy.distributed_iterator import Reading, ReplicaIterator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.protocol import Shards
from tfrep_strategy.strategies.base import SynchronousStrategy

InputFn = Callable[..., Any]


class InputReplicationMode(enum.Enum):
    """How often an input function is called, and who gets what its pipeline gives.

    Elements of a pipeline are batches of one replica, in all modes.
    """

    SINGLE = "single"
    """One pipeline; its elements go to the replicas in turn. Processes each read all of it, data set or callable, and take
    what is theirs, so that it has to give the same elements everywhere."""
    PER_WORKER = "per_worker"
    """One pipeline in each process."""
    PER_REPLICA = "per_replica"
    """One pipeline for each replica."""


class InputContext(tf.distribute.InputContext):
    """What an input function is told: `num_replicas_in_sync`, `input_pipeline_id` and `num_input_pipelines`.

    Example:
        >>> InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divides the size of a global batch by the number of replicas.

        Args:
            global_batch_size: Examples in a step of all replicas.

        Returns:
            Examples in a step of one replica.

        Raises:
            ConfigurationError: when it does not divide.

        Example:
            >>> InputContext(1, 0, 2).get_per_replica_batch_size(32)
            16
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigurationError(
                message(
                    "The global batch does not divide among the replicas.",
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
    except ValueError:  # A builtin tells nothing.
        takes_context = True
    return input_fn(context) if takes_context else input_fn()


def per_pipeline(strategy: tf.distribute.Strategy, mode: InputReplicationMode, input_fn: InputFn) -> Any:
    """Makes a distributed data set by TensorFlow's own means, for strategies that do not cut batches themselves.

    Raises:
        ConfigurationError: for an input function that returns no data set.
    """

    def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
        process = _Process(context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync)
        made = process.call(mode, input_fn)
        if not all(isinstance(m, tf.data.Dataset) for m in made):
            raise ConfigurationError(
                message(
                    "Under this strategy an input function returns a tf.data.Dataset.",
                    strategy=type(strategy).__name__,
                    returned=type(made[0]).__name__,
                )
            )
        return process.joined(mode, made)

    return strategy.distribute_datasets_from_function(dataset_of)


class _Process(NamedTuple):
    """Whose input functions are called.

    Attributes:
        rank: Which process this is.
        size: How many there are.
        total: How many replicas all of them have.
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
        """Makes one data set of the pipelines, whose elements go to the replicas of this process in turn."""
        if mode == InputReplicationMode.SINGLE and self.size > 1:
            made = [made[0].shard(self.total, replica) for replica in self.replicas]
        if len(made) == 1:
            return made[0]
        return tf.data.Dataset.choose_from_datasets(made, tf.data.Dataset.range(len(made)).repeat())

    def take(self, mode: InputReplicationMode, made: list[Callable[[], Any]]) -> tuple[Any, ...]:
        """Takes a batch for each replica of this process."""
        if mode == InputReplicationMode.SINGLE:
            taken = [made[0]() for _ in range(self.total)]
            own = [taken[replica] for replica in self.replicas]
        else:
            own = [made[i % len(made)]() for i in range(len(self.replicas))]
        return tuple(tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in own)


def make_input(strategy: tf.distribute.Strategy, mode: InputReplicationMode, input_fn: InputFn) -> Any:
    """Calls an input function once for each pipeline of this process.

    Args:
        strategy: Whose replicas read.
        mode: Which pipelines there are.
        input_fn: Returns a `tf.data.Dataset` of batches of one replica, or a callable that gives such a batch.

    Returns:
        An iterator of steps, or a function that gives a step's `Shards` whenever it is called.

    Raises:
        ConfigurationError: for an input function that returns something else.
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

        def batches() -> Shards:
            parts = process.take(mode, made)
            total, _ = agreement.next_step(tf.constant(True), tf.add_n([num_examples(part) for part in parts]))
            return Shards(parts, total)

        return batches
    raise ConfigurationError(
        message(
            "An input function returns a tf.data.Dataset, or a callable that gives a nest of tensors.",
            returned=[type(m).__name__ for m in made],
            first_replica=process.replicas[0],
        )
    )


def whole_step(batch: Any) -> Any:
    """Ends the data, with a warning, when it has ended in the middle of a step: a replica without a batch has no mean."""
    if not isinstance(batch, Shards) or len(batch.parts) == 1:
        return batch
    missing = tf.reshape(tf.where(tf.stack([num_examples(part) for part in batch.parts]) == 0), [-1])

    def end() -> tf.Tensor:
        warning = tf.print("Warning: the data ended in the middle of a step, which is left out. Replicas without a batch:",
                           missing, output_stream=sys.stderr)  # fmt: skip
        with tf.control_dependencies([] if warning is None else [warning]):
            return iter(tf.data.Dataset.range(0)).get_next()

    ended = tf.cond(tf.size(missing) > 0, end, lambda: tf.constant(0, tf.int64))
    with tf.control_dependencies([ended]):
        return tf.nest.map_structure(tf.identity, batch, expand_composites=True)
