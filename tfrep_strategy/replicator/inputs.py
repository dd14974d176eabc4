"""What an input function is told, and how its pipelines become what replicas read."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy import data
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.protocol import Shards
from tfrep_strategy.strategies.base import SynchronousStrategy

InputFn = Callable[..., Any]


class InputReplicationMode(enum.Enum):
    """How often an input function is called, and who gets what its pipeline gives.

    Elements of a pipeline are batches of one replica, in all modes.
    """

    SINGLE = "single"
    """One pipeline; its elements go to the replicas in turn. Processes each read it and take what is theirs, so that it has
    to give the same elements everywhere."""
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


def per_pipeline(strategy: tf.distribute.Strategy, input_fn: InputFn) -> Any:
    """Makes a distributed data set by TensorFlow's own means, for strategies that do not cut batches themselves.

    Raises:
        ConfigurationError: for an input function that returns no data set.
    """

    def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
        own = InputContext(context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        made = call_input(input_fn, own)
        if not isinstance(made, tf.data.Dataset):
            raise ConfigurationError(
                message(
                    "Under this strategy an input function returns a tf.data.Dataset.",
                    strategy=type(strategy).__name__,
                    returned=type(made).__name__,
                )
            )
        return made

    return strategy.distribute_datasets_from_function(dataset_of)


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
        return iter(per_pipeline(strategy, input_fn))
    extended = strategy.extended
    agreement = extended._agreement(stop_together=True)
    count, first, total = extended.num_local_replicas, extended.first_local_replica, strategy.num_replicas_in_sync
    places = {
        InputReplicationMode.SINGLE: [(1, 0)],
        InputReplicationMode.PER_WORKER: [(agreement.size, agreement.rank)],
        InputReplicationMode.PER_REPLICA: [(total, first + i) for i in range(count)],
    }[mode]
    made = [call_input(input_fn, InputContext(n, i, total)) for n, i in places]
    if all(isinstance(m, tf.data.Dataset) for m in made):
        dataset = made[0]
        if len(made) > 1:
            dataset = tf.data.Dataset.choose_from_datasets(made, tf.data.Dataset.range(count).repeat())
        if mode == InputReplicationMode.SINGLE:
            dataset = dataset.shard(agreement.size, agreement.rank)
        return data.ReplicaIterator(iter(dataset), count, agreement, as_shards=True)
    if all(callable(m) for m in made):

        def batches() -> Shards:
            parts = tuple(tf.nest.map_structure(tf.convert_to_tensor, made[i % len(made)]()) for i in range(count))
            return Shards(parts, agreement.examples(tf.add_n([data.num_examples(part) for part in parts])))

        return batches
    raise ConfigurationError(
        message(
            "An input function returns a tf.data.Dataset, or a callable that gives a nest of tensors.",
            returned=[type(m).__name__ for m in made],
            first_replica=first,
        )
    )
