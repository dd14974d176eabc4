"""The base of the synchronous strategies: runs steps, cuts batches, and aggregates gradients."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy import data, gradients
from tfrep_strategy.agreement import Agreement
from tfrep_strategy.batches import as_tensors, num_examples, pack, shard, with_unknown_size
from tfrep_strategy.communicators import Communicator
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.fingerprints import Fingerprint, FirstBatch
from tfrep_strategy.keras_integration.protocol import Shards, in_step
from tfrep_strategy.keras_integration.synchronous.driver import SynchronousDriver
from tfrep_strategy.strategies import sync_check
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.strategies.variables import ReplicaVariable, StepsSinceMerge, with_our_class
from tfrep_strategy.tensorflow_integration import pipelines_at_exit  # noqa: F401  (acts when Python ends)

GradientTransformer = Callable[[list[Any]], Sequence[Any]]
GradientAggregator = Callable[[list[Any], Communicator], list[Any]]


class SynchronousStrategy(tf.distribute.Strategy):
    """Base of the strategies whose replicas train in step. Use one of its subclasses.

    Attributes:
        gradient_transformers: Functions that are applied, in order, to the global gradients before the optimizer clips and
            uses them, as in TensorFlow 2.4's optimizers. Each takes a list of (gradient, variable) pairs and returns such a
            list. A function that cannot take pairs takes and returns a list of gradients.
        gradient_aggregator: Replaces the aggregation. Every replica calls `f(gradients, communicator)` with its own
            gradients and communicator; `f` returns the global gradients. The gradients are multiplied by the replica's
            share, so that their sum over the replicas is the global gradient. The default is equivalent to
            `lambda gradients, communicator: communicator.all_reduce(gradients, "sum")`.
        bucket_bytes: Gradients are sent in buckets of about this many bytes.
        densify_sparse_gradients: Whether `tf.IndexedSlices` are sent as dense tensors.
        check_sync_every: Number of steps of `fit` between two calls of `assert_in_sync(model)`; None for no checks.
    """

    collectives_in_branches = False

    def __init__(self, extended: Any, bucket_bytes: int, densify_sparse_gradients: bool) -> None:
        if bucket_bytes <= 0:
            raise ConfigurationError(message("bucket_bytes must be above 0.", bucket_bytes=bucket_bytes))
        super().__init__(extended)
        extended.keras_driver = SynchronousDriver(self)
        self.gradient_transformers: list[GradientTransformer] = []
        self.gradient_aggregator: GradientAggregator | None = None
        self.bucket_bytes = bucket_bytes
        self.densify_sparse_gradients = densify_sparse_gradients
        self.resumes_at = 0, 0
        self.check_sync_every: int | None = None
        self._steps_since_check = 0
        self.first_batch: FirstBatch | None = None
        self.notes_first_batch = True
        self.given_beside: dict[str, Any] = {}

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files and draws progress bars."""
        return self.extended.first_local_replica == 0

    # Steps.

    @property
    def compiles_whole_steps(self) -> bool:
        """Whether XLA may compile a whole step: only a single replica runs no collectives."""
        return self.num_replicas_in_sync == 1

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica; see `tf.distribute.Strategy.run`.

        In a step that Keras drives, `Shards` are the only argument. Each replica then gets its part, and knows its share of
        the global batch.
        """
        self.synchronize_new_variables()
        if len(args) == 1 and isinstance(args[0], Shards):
            self.mark_state_changed()
            shards = args[0]
            if self.num_replicas_in_sync == 1:  # The share is 1, and the step is that of one device.
                args = (pack(shards),)
            else:
                if not tf.executing_eagerly():
                    shards = Shards(tuple(map(with_unknown_size, shards.parts)), shards.total)
                fn, args = in_step(self, fn, num_examples), (pack(shards), shards.total)
        else:
            self.extended.note_step()
        with self.watching_peers():
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces a result of `run` over the replicas; see `tf.distribute.Strategy.reduce`.

        Args:
            reduce_op: `"SUM"`, `"MEAN"` or a `tf.distribute.ReduceOp`.
            value: A value for each replica. A single value for all replicas of a process has a mean, but no sum.
            axis: Dimension, or dimensions, of each replica's value to reduce along, too; None for no dimension.

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

    def shard(self, batch: Any) -> Shards:
        """Cuts a global batch for the replicas of this process.

        Args:
            batch: A nest of arrays or tensors whose first dimension is the batch; None leaves are kept.

        Returns:
            `Shards`, one part for each local replica.
        """
        extended = self.extended
        return shard(
            as_tensors(batch), self.num_replicas_in_sync, extended.first_local_replica, extended.num_local_replicas
        )

    # Gradients.

    def aggregate_gradients(self, replica_gradients: Sequence[Any]) -> list[Any]:
        """Aggregates the gradients of the replicas to the global gradients. Every replica calls it.

        Args:
            replica_gradients: The gradient of each variable, weighed by the replica's share: `tf.Tensor`, `tf.IndexedSlices`
                or None.

        Returns:
            Their sums over the replicas.
        """
        densify = self.densify_sparse_gradients
        own = [gradients.dense(g) if densify or gradients.has_fixed_rows(g) else g for g in replica_gradients]
        if self.gradient_aggregator is not None:
            replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            return list(self.gradient_aggregator(own, self.communicator_of(replica)))
        return gradients.aggregate(
            own,
            all_reduce=self.sum_over_replicas,
            all_gather=self.gather_over_replicas,
            bucket_bytes=self.bucket_bytes,
        )

    def mean_over_processes(self, own_gradients: Sequence[Any]) -> list[Any]:
        """Averages gradients that every process computed outside replicas. A single process returns them unchanged."""
        return list(own_gradients)

    def transform_gradients(self, global_gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Applies `gradient_transformers` to global gradients, in order."""
        result = list(global_gradients)
        for transform in self.gradient_transformers:
            result = gradients.transformed(transform, result, variables)
        return result

    @abc.abstractmethod
    def sum_over_replicas(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over all replicas; called inside a replica."""

    @abc.abstractmethod
    def gather_over_replicas(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates tensors along the first dimension, in replica order; called inside a replica. Sizes may differ."""

    # Communication between replicas.

    @abc.abstractmethod
    def communicator_of(self, replica: int) -> Communicator:
        """Returns the communicator of a replica of this process."""

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

    # State.

    def mark_state_changed(self) -> None:
        """Records that replicas have run a step since their own state was merged."""
        self.extended.steps.mark()

    def merge_replica_state(self) -> None:
        """Sets the state that each replica keeps for itself (moving statistics) to its mean over the replicas.

        Every process must call it. Keras's `fit`, `evaluate` and `predict` call it.
        """
        if not self.extended.steps.not_merged():
            return
        common = self._own_of_replicas(tf.VariableAggregation.MEAN)
        with self.scope():
            for variable, mean in zip(common, self._means(common), strict=True):
                variable.assign(mean)
        self.extended.steps.merged()

    def collect_sums(self) -> None:
        """Adds up sums of which every process holds a part on rank 0, which can then read them alone."""

    def _own_of_replicas(self, aggregation: tf.VariableAggregation) -> list[Any]:
        """Lists the variables that replicas have changed independently, in the same order on every process."""
        own = {
            order: variable
            for order, variable in sorted(self.extended.replica_variables.items())
            if variable.differs and variable.aggregation == aggregation
        }
        # Python may have freed the variables of a deleted model on one process, and not yet on another.
        alive = set.intersection(*map(set, self.all_gather_object(list(own))))
        return [variable for order, variable in own.items() if order in alive]

    def _means(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        return [variable.read_value() for variable in variables]

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
            check_count("A check comes after at least one step.", every=every)
            self.check_sync_every = every
        self.synchronize_new_variables()
        checksums = sync_check.replica_checksums(
            sync_check.variables_of(model_or_variables), self.extended.num_local_replicas
        )
        sync_check.compare([replica for process in self.all_gather_object(checksums) for replica in process])

    def count_steps(self, model: Any, count: int) -> None:
        """Checks a model every `check_sync_every` steps. It is called after each `count` steps of `fit` or `evaluate`."""
        if self.check_sync_every:
            self._steps_since_check += count
            if self._steps_since_check >= self.check_sync_every:
                self._steps_since_check = 0
                self.assert_in_sync(model)

    def watching_peers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the error of a collective names a process that has ended."""
        return contextlib.nullcontext()

    def synchronize_new_variables(self) -> None:
        """Gives variables made since the last call the values of rank 0. A single process does nothing."""

    def acting_alone(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this process may make variables that the others do not make."""
        return contextlib.nullcontext()

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives variables the values of rank 0. A single process does nothing."""

    def begin_call(self, settings: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Begins a `fit`, `evaluate` or `predict`: shares the random state and compares the arguments of the ranks.

        A single process does nothing.
        """

    def check_same(self, given: Fingerprint) -> None:
        """Refuses data that differs between the processes. A single process does nothing."""

    def shortest_epoch(self, num_batches: int) -> int:
        """Returns the smallest number of batches of a process, given the number of this process.

        Infinite and unknown numbers are `tf.data`'s negative cardinalities. If one number is unknown, so is the result.
        """
        return num_batches

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's picklable object on every process."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every process's picklable object, in rank order."""
        return [value]

    def first_with(self, values: Sequence[Any]) -> list[bool]:
        """Returns for each value whether no process of lower rank has passed it. Every process must call it."""
        gathered = self.all_gather_object(list(values))
        before = gathered[: self.extended.first_local_replica] if len(gathered) > 1 else []
        return [all(value not in others for others in before) for value in values]

    def barrier(self) -> None:
        """Returns when every process has called it."""

    @abc.abstractmethod
    def gather_outputs(self, outputs: Any) -> Any:
        """Concatenates the outputs of the replicas (a nest) along the batch, in replica order, on every process."""


def _is_of_replicas(value: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(value))


class SynchronousExtended:
    """Mixin for the `extended` of the synchronous strategies. It comes before TensorFlow's class."""

    first_local_replica = 0
    num_local_replicas = 1
    worker_devices: Any
    _num_replicas_in_sync: Any

    def _init_state(self) -> None:
        # The key is the order of creation, which is the same on every process.
        self.replica_variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.steps = StepsSinceMerge()
        self._agreements: dict[bool, Agreement] = {}
        self.reads_alone = False
        """Whether this process reads variables without the others; it has received their parts before."""

    def note_step(self) -> None:
        """Records a step of the user's own loop."""
        if tf.executing_eagerly():
            self.steps.mark()
        else:
            self.steps.mark_in_graph()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # A variable that a step makes (an optimizer slot, a lazily built layer) is made outside the function being traced. In
        # the function its copies could not be initialized.
        lift = callable(kwargs.get("initial_value")) and not tf.executing_eagerly()
        with tf.init_scope() if lift else contextlib.nullcontext():
            variable = super()._create_variable(next_creator, **dict(kwargs))  # type: ignore[misc]
            variable = with_our_class(self._contain(variable, **kwargs))
            if isinstance(variable, ReplicaVariable):
                variable.spread_initial_value()
            return variable

    def _contain(self, variable: Any, **kwargs: Any) -> Any:
        """Puts a variable into a container, if TensorFlow's class has not done so."""
        return variable

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> data.ReplicaDataset:
        return data.distribute(dataset, self.local_replicas(stop_together=False), options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> data.ReplicaDataset:
        return data.distribute_from_function(dataset_fn, self.local_replicas(stop_together=False), options)

    def local_replicas(self, stop_together: bool) -> data.LocalReplicas:
        """Returns the replicas of this process, for the functions of `data`."""
        if stop_together not in self._agreements:  # Iterators share functions only if they share the agreement.
            self._agreements[stop_together] = self._agreement(stop_together)
        return data.LocalReplicas(self.first_local_replica, tuple(self.worker_devices), self._agreements[stop_together])

    def value_of_first_replica(self, local: tf.Tensor) -> tf.Tensor:
        """Returns the value of replica 0, given the value of the first replica of this process."""
        return tf.identity(local)

    def _agreement(self, stop_together: bool) -> Agreement:
        return Agreement(0, 1, lambda counts: counts, stop_together)
