"""The `extended` of the synchronous strategies: variables, data, gradients, state, and communication between processes."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.devices import warn_of_sparse_gradients
from tfrep_strategy.communicators import Communicator, gradients
from tfrep_strategy.communicators.sharding import Along, Cut, Even
from tfrep_strategy.communicators.wire import compressed_gather, compressed_sum, gather_rows
from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.step import KnownRows, Shards
from tfrep_strategy.core.tf import regroup
from tfrep_strategy.data import distribution
from tfrep_strategy.data.agreement import Agreement, Fingerprint, FirstBatch
from tfrep_strategy.data.batches import as_tensors, has_one_size, known_examples, map_rows, shard
from tfrep_strategy.data.step_clock import timed_collectives
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.refusals import NoticesKeras2
from tfrep_strategy.keras_integration.synchronous.threads import answers_alone
from tfrep_strategy.partitioner.between_replicas import Gradients
from tfrep_strategy.partitioner.emitter import Transport
from tfrep_strategy.partitioner.second_axis import BATCH, MODEL
from tfrep_strategy.strategies.partitioned_steps import PartitionedSteps
from tfrep_strategy.strategies.settings import functions
from tfrep_strategy.strategies.variables import PartVariable, ReplicaVariable, ShardedWeight, StepsSinceMerge, with_our_class


def gathered(value: Any, communicator: Communicator) -> Any:
    """Concatenates the values of the ranks, in rank order. Every process must call it.

    Args:
        value: A dense, sparse or ragged tensor whose first dimension is the batch, or a scalar; scalars are stacked.
        communicator: The communicator of the ranks.

    Returns:
        A tensor of the same kind.
    """
    gather = functools.partial(gather_rows, communicator.all_gather)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(gathered(value.values, communicator), gather(value.row_lengths()))
    if isinstance(value, tf.SparseTensor):
        shapes = gather(value.dense_shape[tf.newaxis])
        before = tf.reduce_sum(shapes[: communicator.rank, 0])
        offset = tf.concat([[before], tf.zeros([tf.size(value.dense_shape) - 1], tf.int64)], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(gather(value.indices + offset), gather(value.values), shape)
    return gather(value[tf.newaxis] if value.shape.rank == 0 else value)


def without_rows(value: Any) -> Any:
    """Returns a tensor like another one, with no rows. It does not keep the memory of the other one.

    Args:
        value: A dense, sparse or ragged tensor whose first dimension is the batch.

    Example:
        >>> without_rows(tf.ones([3, 2])).shape.as_list()
        [0, 2]
    """
    if isinstance(value, tf.RaggedTensor):
        splits = tf.zeros([1], value.row_splits.dtype)
        return tf.RaggedTensor.from_row_splits(without_rows(value.values), splits, validate=False)
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([[0], value.dense_shape[1:]], 0)
        return tf.SparseTensor(without_rows(value.indices), without_rows(value.values), shape)
    return tf.zeros(tf.concat([[0], tf.shape(value)[1:]], 0), value.dtype)


class SynchronousExtended(NoticesKeras2):
    """Methods that this package and the Keras integration call on a synchronous strategy. Users need none of them.

    This is a mixin for the `extended` of the strategies. It comes before TensorFlow's class.
    """

    first_local_replica = 0
    num_local_replicas = 1
    collectives_in_branches = False
    keras_driver: Any
    worker_devices: Any
    _num_replicas_in_sync: Any
    _container_strategy: Any

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._container_strategy()

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files and draws progress bars. Users ask `tfrep.is_chief()`."""
        return self.first_local_replica == 0

    def _init_state(self) -> None:
        # The key is the order of creation, which is the same on every process.
        self.replica_variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.steps = StepsSinceMerge()
        self._agreements: dict[bool, Agreement] = {}
        self._steps_since_check = 0
        self.resumes_at = 0, 0
        self.validations_done = 0
        self.first_batch: FirstBatch | None = None
        self.notes_first_batch = True
        self.reads_at_most: Setting[int | None] = Setting(None)
        self._num_steps = 0
        self.partitioned_steps: Setting[Any] = Setting(None)
        """The `PartitionedSteps` of the function that Keras calls now; None if each replica runs its own step."""
        self.steps_of: weakref.WeakKeyDictionary[Any, list[tuple[str, PartitionedSteps]]] = weakref.WeakKeyDictionary()
        """For each model: its phases, and the steps of each."""
        self.given_beside: dict[str, Any] = {}
        self.cut_of_new_variables: Setting[Cut | None] = Setting(None)
        """The part of new variables that each replica holds; None if each holds the whole."""
        self._acts_alone = False
        self._transports: dict[int, Transport] = {}
        self._pid = os.getpid()
        self.totals: dict[int, tf.Tensor] = {}
        """Values of variables that were summed together before they are read, by the ids of the variables."""

    @property
    def reads_alone(self) -> bool:
        """Whether this process, or this thread of it, reads variables without the others."""
        return self._acts_alone or answers_alone.value

    def refuse_fork(self) -> None:
        """Refuses a process that was forked after the strategy was made.

        Raises:
            ConfigurationError: The process was forked. TensorFlow would wait forever for threads that the fork does not have, and
                the parent uses the same connections.
        """
        if os.getpid() != self._pid:
            raise ConfigurationError(
                message(
                    "A process that was forked from one with a strategy cannot train or predict: it has no threads of TensorFlow.",
                    hint="start it with multiprocessing.get_context('spawn').",
                    pid=os.getpid(),
                    forked_from=self._pid,
                )
            )

    def note_step(self) -> None:
        """Records a step of the user's own loop."""
        if tf.executing_eagerly():
            self.steps.mark()
        else:
            self.steps.mark_in_graph()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        self.refuse_fork()
        # A variable that a step makes (an optimizer slot, a lazily built layer) is made outside the function being traced, where
        # its copies can be initialized.
        cut = self.cut_of_new_variables.value
        lift = callable(kwargs.get("initial_value")) and not tf.executing_eagerly()
        with tf.init_scope() if lift else contextlib.nullcontext():
            if isinstance(cut, Along):
                value = tf.convert_to_tensor(
                    initial() if callable(initial := kwargs["initial_value"]) else initial, kwargs.get("dtype")
                )
                return ShardedWeight.made(self, next_creator, cut, **kwargs | {"initial_value": self.initial_on_all(value)})
            if cut is not None:
                kind = ShardedWeight if cut.is_whole_where_read else PartVariable
                return kind.made(self, next_creator, cut, **kwargs)
            if self._may_be_sharded(**kwargs):
                initial = kwargs["initial_value"]
                value = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
                kwargs["initial_value"] = lambda: value
                if self._is_sharded(value):
                    cut = Even(value.shape, self._num_replicas_in_sync, is_whole_where_read=True)
                    kwargs["initial_value"] = self.initial_on_all(value)
                    return ShardedWeight.made(self, next_creator, cut, **kwargs)
            variable = super()._create_variable(next_creator, **dict(kwargs))
            variable = with_our_class(self._contain(variable, **kwargs))
            if isinstance(variable, ReplicaVariable):
                variable.spread_initial_value()
            return variable

    def _may_be_sharded(self, **kwargs: Any) -> bool:
        """Returns whether a new variable is a weight that may be kept in parts, if it is large."""
        strategy = self.strategy
        if not strategy.shard_weights or self._num_replicas_in_sync == 1 or self._acts_alone:
            return False
        how = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
        is_weight = kwargs.get("trainable") in (None, True) and how == tf.VariableSynchronization.AUTO
        return is_weight and kwargs.get("initial_value") is not None and kwargs.get("shape") is None

    def _is_sharded(self, value: tf.Tensor) -> bool:
        """Returns whether a weight of this value is kept in parts."""
        size = (value.shape.num_elements() or 0) * value.dtype.size
        is_known = not tf.is_symbolic_tensor(value)
        return is_known and value.dtype.is_floating and size >= self.strategy.shard_weights_min_bytes

    def initial_on_all(self, value: tf.Tensor) -> tf.Tensor:
        """Returns rank 0's initial value of a weight that is kept in parts. All processes make it."""
        return value

    def _contain(self, variable: Any, **kwargs: Any) -> Any:
        """Wraps a variable in a container of copies, unless TensorFlow's class has done so."""
        return variable

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> distribution.ReplicaDataset:
        return distribution.distribute(dataset, self.local_replicas(stop_together=False), options, most=self.reads_at_most.value)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> distribution.ReplicaDataset:
        return distribution.distribute_from_function(dataset_fn, self.local_replicas(stop_together=False), options)

    def local_replicas(self, stop_together: bool) -> distribution.LocalReplicas:
        """Returns the replicas of this process, for the functions of `data`."""
        if stop_together not in self._agreements:  # Iterators share functions only if they share the agreement.
            self._agreements[stop_together] = self._agreement(stop_together)
        return distribution.LocalReplicas(self.first_local_replica, tuple(self.worker_devices), self._agreements[stop_together])

    def value_of_first_replica(self, local: tf.Tensor) -> tf.Tensor:
        """Returns the value of replica 0, given the value of the first replica of this process."""
        return tf.identity(local)

    def _agreement(self, stop_together: bool) -> Agreement:
        return Agreement(0, 1, lambda counts: counts, stop_together)

    # Steps.

    @property
    def compiles_whole_steps(self) -> bool:
        """Whether XLA may compile a whole step: only a single replica runs no collectives."""
        return self._num_replicas_in_sync == 1

    model_size = 1
    """Number of consecutive replicas that compute with the same rows of a batch, and with parts of the weights."""

    keeps_own_rows = False
    """Whether a process keeps only its own rows of sharded results."""

    def new_partitioned_steps(self, builds: bool, known: KnownRows, model: Any, phase: str) -> PartitionedSteps:
        """Makes the `PartitionedSteps` for a phase of a model, such as "train"."""
        steps = PartitionedSteps(self.strategy, builds, known, self.keeps_own_rows, self.name_of_step(phase))
        self.steps_of.setdefault(model, []).append((phase, steps))
        return steps

    def name_of_step(self, what: str) -> str:
        """Returns a name for a step that is traced now. All processes trace steps in one order, so the names agree."""
        self._num_steps += 1
        return f"{what} {self._num_steps}"

    def forget_step(self) -> None:
        """Takes the last name back, because other processes may not have traced the step."""
        self._num_steps -= 1

    def note_call(self, what: str) -> None:
        """Reports to the other processes that this one calls a function now. It does not wait for them."""

    def partitioned_by(self, steps: PartitionedSteps | None, compiled: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which `strategy.run` uses the given partitioned steps; see `KerasExtended`."""
        return self.partitioned_steps.to(steps)

    @property
    def of_gradients(self) -> Gradients:
        """The communication of gradients in a partitioned step."""
        return Gradients(self.bucket_bytes_for, lambda: self.strategy.compression, self._run_on_each, timed_collectives)

    def _run_on_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a function on each replica of this process, with the arguments of that replica; returns the results of each."""
        given = [regroup(each) for each in zip(*arguments, strict=True)]
        results = [self.strategy.experimental_local_results(each) for each in self.strategy.run(function, given)]
        return [list(each) for each in zip(*results, strict=True)]

    @property
    def transport(self) -> Transport:
        """The transport between the replicas in a partitioned step."""
        if self.model_size not in self._transports:
            with tf.init_scope():
                self._transports[self.model_size] = self._new_transport()
        return self._transports[self.model_size]

    @abc.abstractmethod
    def _new_transport(self) -> Transport:
        """Makes the transport for the present `model_size`."""

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """The replicas that a collective along an axis of the mesh connects, by the name of the axis; empty for one axis."""
        replicas, size = list(range(self._num_replicas_in_sync)), self.model_size
        if size in (1, len(replicas)):
            return {}
        within = [replicas[first : first + size] for first in replicas[::size]]
        return {MODEL: within, BATCH: [replicas[place::size] for place in range(size)]}

    def in_groups(self, shards: Shards) -> Shards:
        """Gives each replica of this process the rows of all replicas that compute with the same rows."""
        return shards

    def rows_before(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the number of rows of a batch on the processes before this one. Every process must call it.

        Args:
            count: int32 scalar, the number of rows of this process, with those of its group.
        """
        return tf.zeros_like(count)

    def shard(self, batch: Any) -> Shards:
        """Cuts a global batch for the replicas of this process.

        Args:
            batch: A nest of arrays or tensors whose first dimension is the batch; None leaves are kept.

        Returns:
            `Shards`, one part for each local replica.
        """
        return shard(as_tensors(batch), self._num_replicas_in_sync, self.first_local_replica, self.num_local_replicas)

    def known_rows(self, batch: Any) -> KnownRows:
        """Returns what is known about the rows of a batch. All processes get the same result."""
        batch = as_tensors(batch)
        alike = bool(has_one_size(batch))
        return KnownRows(alike, known_examples(batch) if alike else None, are_even=alike)

    # Gradients.

    def aggregate_gradients(self, replica_gradients: Sequence[Any]) -> list[Any]:
        """Aggregates the gradients of the replicas to the global gradients. Every replica calls it.

        Args:
            replica_gradients: The gradient of each variable, weighted by the replica's share: `tf.Tensor`, `tf.IndexedSlices`
                or None.

        Returns:
            Their sums over the replicas.
        """
        own = [gradients.dense(g) if self.strategy.densify_sparse_gradients else g for g in replica_gradients]
        if self._num_replicas_in_sync > 1 and any(isinstance(g, tf.IndexedSlices) for g in own):
            warn_of_sparse_gradients(self.worker_devices)
        return timed_collectives(self._aggregate, own)

    def _aggregate(self, own: Sequence[Any]) -> list[Any]:
        strategy = self.strategy
        if strategy.gradient_aggregator is not None:
            return list(strategy.gradient_aggregator(own, self.own_communicator()))
        return gradients.aggregate(
            own,
            all_reduce=self.sum_gradients,
            all_gather=self.gather_gradients,
            bucket_bytes=self.bucket_bytes_for(own),
        )

    def bucket_bytes_for(self, tensors: Sequence[Any]) -> int:
        """Returns the size in bytes of the buckets for gradients like these. Every replica calls it."""
        return self.strategy.bucket_bytes

    def sum_gradients(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense gradients over all replicas; called inside a replica."""
        kind = self.strategy.compression
        return self.sum_over_replicas(tensors) if kind is None else compressed_sum(self.own_communicator(), tensors, kind)

    def gather_gradients(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the values or the indices of sparse gradients, in replica order; called inside a replica."""
        kind = self.strategy.compression
        return self.gather_over_replicas(tensor) if kind is None else compressed_gather(self.own_communicator(), tensor, kind)

    def mean_over_processes(self, own_gradients: Sequence[Any]) -> list[Any]:
        """Averages gradients that every process computed outside replicas. A single process returns them unchanged."""
        return list(own_gradients)

    def transform_gradients(self, global_gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Applies `gradient_transformers` to global gradients, in order."""
        result = list(global_gradients)
        for transform in functions("gradient_transformers", self.strategy.gradient_transformers):
            result = gradients.transformed(transform, result, variables)
        return result

    def sum_over_replicas(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over all replicas; called inside a replica."""
        return self.own_communicator().all_reduce(list(tensors), "sum") if tensors else []

    def gather_over_replicas(self, tensor: Any) -> Any:
        """Concatenates tensors along the first dimension in replica order; called inside a replica.

        Strings, ragged and sparse tensors are allowed, and sizes may differ.
        """
        return gathered(tensor, self.own_communicator())

    def gather_batch(self, part: Any) -> Any:
        """Returns the global batch, given the part of this replica; called inside a replica."""
        return map_rows(self.gather_over_replicas, part)

    @abc.abstractmethod
    def whole_batch(self, shards: Shards) -> Any:
        """Returns the global batch, given the parts of this process; called outside replicas, by every process."""

    @abc.abstractmethod
    def communicator_of(self, replica: int) -> Communicator:
        """Returns the communicator of a replica of this process."""

    def own_communicator(self) -> Communicator:
        """Returns the communicator of the calling replica."""
        context: Any = tf.distribute.get_replica_context()
        return self.communicator_of(int(tf.get_static_value(context.replica_id_in_sync_group)))

    # State.

    def mark_state_changed(self) -> None:
        """Records that replicas have run a step since their own state was last merged."""
        self.steps.mark()

    def collect_parts(self, reads: bool = True) -> None:
        """Lets single processes read variables whose values are spread over all processes. Rank 0 then holds the sums.

        Args:
            reads: Whether this process reads them.
        """

    def release_parts(self) -> None:
        """Frees the values that `collect_parts` has gathered."""

    def merge_replica_state(self) -> None:
        """Sets the state that each replica keeps for itself (moving statistics) to its mean over the replicas.

        Every process must call it. Keras's `fit`, `evaluate` and `predict` call it.
        """
        if not self.steps.not_merged():
            return
        (common,) = self.own_of_replicas(tf.VariableAggregation.MEAN)
        with self.strategy.scope():
            for variable, mean in zip(common, self.means(common), strict=True):
                variable.assign(mean)
        self.steps.merged()

    @abc.abstractmethod
    def take_from_first(self, model: Any) -> None:
        """Copies the variables of a model and its optimizer from replica 0 to the others. Every process must call it.

        A step fails when it finds no more data. TensorFlow then stops its other operations at any point, so a replica may or may
        not have counted the step or decayed weights.
        """

    def summed_at_once(self, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which variables that are summed over processes are read with one collective for all of them."""
        return contextlib.nullcontext()

    def any_process(self, wish: bool) -> bool:
        """Returns whether `wish` is true on any process. Every process must call it, equally often."""
        return wish

    def own_of_replicas(self, *aggregations: tf.VariableAggregation) -> list[list[Any]]:
        """Lists the variables that replicas have changed independently, in the same order on every process.

        Args:
            *aggregations: A list is returned for each of these. The list for `SUM` also has variables that were not changed.
        """
        own = {
            order: variable
            for order, variable in sorted(self.replica_variables.items())
            if variable.aggregation in aggregations and (variable.differs or variable.aggregation == tf.VariableAggregation.SUM)
        }
        # Python may have freed the variables of a deleted model on one process, and not yet on another.
        alive = set.intersection(*map(set, self.all_gather_object(list(own))))
        variables = [variable for order, variable in own.items() if order in alive]
        return [[v for v in variables if v.aggregation == aggregation] for aggregation in aggregations]

    def means(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the mean over the replicas of variables that each replica keeps for itself."""
        return [variable.read_value() for variable in variables]

    def count_steps(self, model: Any, count: int) -> None:
        """Checks a model every `check_sync_every` steps. It is called after each `count` steps of `fit` or `evaluate`."""
        strategy = self.strategy
        if strategy.check_sync_every:
            self._steps_since_check += count
            if self._steps_since_check >= strategy.check_sync_every:
                self._steps_since_check = 0
                strategy.assert_in_sync(model)

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
        before = gathered[: self.first_local_replica] if len(gathered) > 1 else []
        return [all(value not in others for others in before) for value in values]

    def barrier(self) -> None:
        """Returns when every process has called it."""

    def kept_outputs(self, outputs: Any) -> Any:
        """Returns the rows of a batch's outputs that this process keeps until `predict` returns."""
        return outputs

    @abc.abstractmethod
    def gather_outputs(self, outputs: Any) -> Any:
        """Concatenates the outputs of the replicas (a nest) along the batch, in replica order, on every process."""
