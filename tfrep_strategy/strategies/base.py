"""The common part of the synchronous strategies: steps, groups, and settings of gradients and checks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.wire import DTYPES
from tfrep_strategy.core.old_spellings import OF_STRATEGIES, ShowsNewNames
from tfrep_strategy.core.step import Shards, in_step
from tfrep_strategy.core.tf import Function
from tfrep_strategy.data import pipeline_ends  # noqa: F401  (acts when Python ends)
from tfrep_strategy.data.batches import known_total, num_examples, pack, with_unknown_size
from tfrep_strategy.data.distribution import explain
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.keras_integration.synchronous.driver import SynchronousDriver
from tfrep_strategy.keras_integration.synchronous.saving import write_checkpoints_safely
from tfrep_strategy.strategies import in_sync, partitioned_functions
from tfrep_strategy.strategies.groups import ReplicaGroup, process_strategy
from tfrep_strategy.strategies.one_device import HasOneReplica
from tfrep_strategy.strategies.partitioned_functions import PartitionedFunction
from tfrep_strategy.strategies.settings import (
    CheckedSetting,
    flag,
    function,
    functions,
    one_of,
    or_none,
    positive,
    refuse_graph_mode,
)

GradientTransformer = Callable[[list[Any]], Sequence[Any]]
GradientAggregator = Callable[[list[Any], Communicator], list[Any]]


class SynchronousStrategy(HasOneReplica, ShowsNewNames, tf.distribute.Strategy):
    """Base of the strategies whose replicas train in step. Use one of its subclasses.

    The settings below are arguments of its constructor, and attributes. All but `shard_optimizer_state`, `shard_weights`,
    `shard_weights_min_bytes` and `batch_statistics` can be set before the next step. Methods for Keras and for the rest of this
    package are on `extended`.

    Attributes:
        bucket_bytes: Gradients are sent in buckets of about this many bytes.
        compression: `"bf16"` or `"fp16"` if gradients travel as 16-bit floats; None if they do not.
        densify_sparse_gradients: Whether `tf.IndexedSlices` are sent as dense tensors.
        gradient_transformers: Functions that are applied, in order, to the global gradients before the optimizer clips and
            uses them, as in TensorFlow 2.4's optimizers. Each takes a list of (gradient, variable) pairs and returns such a
            list. A function that cannot take pairs takes and returns a list of gradients.
        gradient_aggregator: Replaces the aggregation. Every replica calls `f(gradients, communicator)` with its own
            gradients and communicator; `f` returns the global gradients. The gradients are multiplied by the replica's
            share, so that their sum over the replicas is the global gradient. The default is equivalent to
            `lambda gradients, communicator: communicator.all_reduce(gradients, "sum")`.
        check_sync_every: Number of steps of `fit` between two calls of `assert_in_sync(model)`; None for no checks.
        shard_optimizer_state: Whether each replica keeps its part of the optimizer's slots only (ZeRO-1).
        shard_weights: Whether each replica keeps its part of the weights only, too (ZeRO-3, FSDP).
        shard_weights_min_bytes: Smaller weights stay whole.
        batch_statistics: `"global"`: `BatchNormalization` takes mean and variance of the global batch, as one device does.
            `"replica"`: each replica takes those of its rows.
        allow_plain_models: Whether models that were made outside the scope may train, each process for itself.
        partition_functions: Whether replicas share the work of a user's `tf.function` as if `tfrep.partition` wrapped it. The
            function must be called in the scope, get or draw rows, and write variables.
    """

    _old_names = OF_STRATEGIES

    bucket_bytes = CheckedSetting(positive("bytes"))
    compression = CheckedSetting(or_none(one_of(*DTYPES)))
    densify_sparse_gradients = CheckedSetting(flag)
    gradient_transformers = CheckedSetting(functions)
    gradient_aggregator = CheckedSetting(or_none(function))
    check_sync_every = CheckedSetting(or_none(positive("steps")))
    shard_optimizer_state = CheckedSetting(flag, fixed=True, at_first=True)
    shard_weights = CheckedSetting(flag, fixed=True, at_first=True)
    shard_weights_min_bytes = CheckedSetting(positive("bytes"), fixed=True, at_first=True)
    batch_statistics = CheckedSetting(one_of("global", "replica"), fixed=True, at_first=True)
    allow_plain_models = CheckedSetting(flag)
    partition_functions = CheckedSetting(flag)

    def __init__(self, extended: Any) -> None:
        super().__init__(extended)
        extended.keras_driver = SynchronousDriver(self)
        write_checkpoints_safely(process_strategy)

    def _set(self, **settings: Any) -> None:
        """Checks and keeps settings. A constructor calls it first, so that a bad setting is refused before anything starts."""
        refuse_graph_mode()
        for name, value in settings.items():
            setattr(self, name, value)
        if self.shard_weights and not self.shard_optimizer_state:
            raise ConfigurationError(
                message(
                    "Weights are sharded together with the optimizer's state.",
                    hint="set shard_optimizer_state=True, too.",
                    shard_weights=self.shard_weights,
                    shard_optimizer_state=self.shard_optimizer_state,
                )
            )

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica; see `tf.distribute.Strategy.run`.

        Steps driven by Keras or a `TfReplicator` get `Shards` as their only argument. A one-device step is traced once and
        partitioned. In other steps each replica gets its part, and knows its share of all examples.
        """
        if self._is_one_replica:
            return super().run(fn, args, kwargs, options)
        self.extended.refuse_fork()
        self.extended.synchronize_new_variables()
        if len(args) == 1 and isinstance(args[0], Shards):
            self.extended.steps.mark()
            shards = args[0]
            if self.num_replicas_in_sync == 1:  # The share is 1, and the step is a one-device step.
                args = (pack(shards),)
            elif (partitioned := self.extended.partitioned_steps.value) is not None:
                with self.extended.watching_peers():
                    return partitioned.run(fn, shards)
            else:
                if not tf.executing_eagerly():
                    shards = shards._replace(parts=tuple(map(with_unknown_size, shards.parts)))
                fn, args = in_step(self, fn, num_examples), (pack(shards), self._total_of(shards))
        elif self.num_replicas_in_sync > 1:
            self.extended.note_step()
        with self.extended.watching_peers():
            return super().run(fn, args, kwargs, options)

    def _total_of(self, shards: Shards) -> tf.Tensor:
        """Returns the number of examples of the global batch: a constant if this process has all replicas and knows their sizes."""
        known = known_total(shards.parts, self.num_replicas_in_sync)
        return shards.total if known is None else tf.constant(known, tf.int64)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces a result of `run` over the replicas; see `tf.distribute.Strategy.reduce`.

        Args:
            reduce_op: `"SUM"`, `"MEAN"` or a `tf.distribute.ReduceOp`.
            value: A value for each replica. A single value for all replicas of a process has a mean, but no sum.
            axis: Dimension, or dimensions, of each replica's value to reduce along as well; None for no dimension.

        Returns:
            A tensor.

        Raises:
            ConfigurationError: `reduce_op` is a sum, and `value` is not one value for each replica.

        Example:
            >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0))))
            2.0
        """
        is_sum = getattr(reduce_op, "name", str(reduce_op)).upper() == "SUM"
        in_replica = tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None  # TensorFlow refuses.
        several = self.extended.num_local_replicas > 1 and not in_replica
        if is_sum and axis is None and several and not _is_of_replicas(value):
            if not tf.is_tensor(value) and np.all(np.equal(value, 0)):
                return tf.zeros_like(value)
            raise ConfigurationError(
                message(
                    "A single value for all replicas has no sum over replicas.",
                    hint="pass a result of strategy.run, or multiply by strategy.num_replicas_in_sync.",
                    value=value,
                )
            )
        if isinstance(value, (bool, int, float)):
            value = tf.convert_to_tensor(value)
        return super().reduce(reduce_op, value, axis)

    @abc.abstractmethod
    def new_group(self, replicas: Sequence[int]) -> ReplicaGroup:
        """Makes a group of replicas, for the argument `group` of collectives. Every process must call it.

        Args:
            replicas: The replica ids of the members.

        Raises:
            ConfigurationError: A replica does not exist, or is given twice.

        Example:
            >>> tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).new_group([1])
            ReplicaGroup([1])
        """

    def explain(self, what: Any) -> str:
        """Describes what a process computes of a data set, or how the steps of a model or a function are partitioned.

        Args:
            what: A `tf.data.Dataset` of global batches: lists the operations that a process computes for its own examples only, and
                why it computes the others for all. A model that has run a step under this strategy: for each phase, how many
                tensors are sharded, partial or replicated; what replicas send in each round; which operations each of them
                computes for all rows. A function whose work replicas share: the same as for a model.

        Example:
            >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.explain(tf.data.Dataset.range(8).batch(4))
            'One process reads the data set and computes all of it.'
        """
        if isinstance(what, tf.data.Dataset):
            return explain(what, self.extended.local_replicas(stop_together=False))
        if isinstance(what, Function):
            what = partitioned_functions.candidate(what) or what
        if isinstance(what, PartitionedFunction):
            return "\n".join(what.describe()) or "The function has not been called on several replicas."
        lines = [f"{phase}: {line}" for phase, steps in self.extended.steps_of.get(what, ()) for line in steps.describe()]
        return "\n".join(lines) or "The model has run no step on several replicas."

    def assert_in_sync(self, model_or_variables: Any, every: int | None = None) -> None:
        """Raises unless all replicas hold the same values, bit by bit. Every process must call it.

        Args:
            model_or_variables: A Keras model, with its optimizer, a layer, or a list of variables. Variables that each
                replica keeps for itself (metrics, moving statistics) are not compared.
            every: If given, also check after each `every` steps of `fit` from now on. It sets `check_sync_every`.

        Raises:
            ConfigurationError: `every` is not an integer, or less than 1.
            DesyncError: A variable differs. The message names the first one, and the value on each replica.

        Example:
            >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> with strategy.scope():
            ...     v = tf.Variable(1.0)
            >>> strategy.assert_in_sync([v])
        """
        if every is not None:
            check_count("Replicas are compared after one or more steps.", every=every)
            self.check_sync_every = every
        self.extended.synchronize_new_variables()
        variables = in_sync.variables_of(model_or_variables)
        checksums = in_sync.replica_checksums(variables, self.extended.num_local_replicas)
        in_sync.compare([replica for process in self.extended.all_gather_object(checksums) for replica in process])


def _is_of_replicas(value: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(value))
