"""The `extended` of `MultiWorkerStrategy`: the methods that TensorFlow and Keras call on it.

The setting `rank_data`: either all ranks pass the same data and each takes its part, or each passes its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators import Communicator, SingleCommunicator, gradients
from tfrep_strategy.core.step import KnownRows, Shards, Share
from tfrep_strategy.core.tf import (
    DistributedVariable,
    MirroredVariable,
    OneDeviceExtended,
    SyncOnReadVariable,
    UpdateContext,
    ValueContext,
    is_mirrored,
)
from tfrep_strategy.data import distribution
from tfrep_strategy.data.agreement import Agreement, Fingerprint, FirstBatch, difference
from tfrep_strategy.data.batches import all_alike, as_tensors, map_rows, num_examples, open_sizes, with_all_open, with_open_sizes
from tfrep_strategy.data.distribution import ReplicaDataset
from tfrep_strategy.errors import ConfigurationError, DesyncError, message, warn
from tfrep_strategy.partitioner.between_replicas import BetweenProcesses
from tfrep_strategy.partitioner.emitter import Transport
from tfrep_strategy.partitioner.second_axis import MODEL
from tfrep_strategy.strategies import in_sync
from tfrep_strategy.strategies.extended import SynchronousExtended, gathered, without_rows
from tfrep_strategy.strategies.in_sync import check_order, own_random_operations, share_random_state
from tfrep_strategy.strategies.replica_context import ProcessReplicaContext
from tfrep_strategy.strategies.variables import PartVariable, ReplicaVariable, ShardedWeight, is_sum

_POLICIES = tf.data.experimental.AutoShardPolicy


def compare(communicator: Communicator, given: Fingerprint) -> None:
    """Refuses data that differs between the ranks. Every rank must call it."""
    own = np.frombuffer(given.digest, np.int32)[np.newaxis]
    refuse_difference(communicator, given, [row.tobytes() for row in communicator.all_gather_equal(tf.constant(own)).numpy()])


def refuse_difference(communicator: Communicator, given: Fingerprint, digests: Sequence[bytes]) -> None:
    """Raises a DesyncError that names the first difference, on every rank, unless all digests are equal."""
    if len(set(digests)) > 1:
        raise DesyncError(difference(communicator.all_gather_object(given.leaves)))


def shortest(sizes: Sequence[int]) -> int:
    """Returns the smallest number of batches of a rank, given the number of each; warns if the numbers differ.

    Infinite and unknown numbers are `tf.data`'s negative cardinalities. If one number is unknown, so is the result.
    """
    known = [size for size in sizes if size >= 0]
    if tf.data.UNKNOWN_CARDINALITY in sizes:
        return int(tf.data.UNKNOWN_CARDINALITY)
    if len(set(sizes)) == 1 or not known:
        return sizes[0]
    ranks = [rank for rank, size in enumerate(sizes) if size == min(known)]
    warn(
        message(
            f"Ranks {ranks} have fewer batches than the others, so an epoch of all ranks ends after {min(known)} batches.",
            hint="give all ranks the same number of batches.",
            batches=sizes,
        )
    )
    return min(known)


def distribute(
    strategy: Any,
    dataset: tf.data.Dataset,
    in_one_order: Callable[[tf.data.Dataset], tf.data.Dataset],
    distribute_whole: Callable[..., ReplicaDataset],
) -> ReplicaDataset:
    """Distributes a data set. Every rank has one.

    Args:
        strategy: The strategy, with its `rank_data`.
        dataset: A data set of global batches.
        in_one_order: Returns the data set with its elements in the same order on all ranks.
        distribute_whole: Distributes the data set by its `auto_shard_policy`, and notes its first batch in `first_batch`.

    Returns:
        The distributed data set. If all ranks should read the same data, its first batch is compared.
    """
    if strategy.communicator.size == 1:
        return distribute_whole(dataset)
    if strategy.rank_data == "own":
        each_its_own = tf.data.Options()
        each_its_own.experimental_distribute.auto_shard_policy = _POLICIES.OFF
        dataset = dataset.with_options(each_its_own)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICIES.OFF:
        return distribute_whole(dataset)
    dataset = in_one_order(dataset)
    if policy == _POLICIES.FILE or strategy.rank_data == "unchecked" or not strategy.extended.notes_first_batch:
        return distribute_whole(dataset)
    return distribute_whole(dataset, first_batch=FirstBatch(strategy.extended.check_same))


_A = tf.VariableAggregation
_PART_BYTES = 32 << 20
_SYNCHRONIZATIONS = [kind for kind in tf.VariableSynchronization if kind != tf.VariableSynchronization.NONE]


class ProcessExtended(SynchronousExtended, OneDeviceExtended):
    """The process's one replica, and its communication with the replicas of other processes.

    Attributes:
        predictions_on_chief_only: Whether `predict` returns no rows on ranks other than the chief, which then keep none.
    """

    collectives_in_branches = True

    def __init__(self, strategy: Any, communicator: Communicator, device: str) -> None:
        super().__init__(strategy, device)
        self._communicator = communicator
        # Eager collectives are reported to rank 0 before they begin; collectives of a function are not.
        self._reduce_in_function = tf.function(communicator.all_reduce, autograph=False)
        self.first_local_replica = communicator.rank
        self.new_variables: list[Any] = []
        self.open_scopes = 0
        self.predictions_on_chief_only = False
        self._init_state()

    def _use_merge_call(self) -> bool:
        return False

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        in_function = not tf.executing_eagerly()
        variable = super()._create_variable(next_creator, **kwargs)
        self.new_variables.append(variable)
        if in_function:  # The variable was made while a step is traced. The step runs before the scope ends.
            self.synchronize_new_variables()
        return variable

    def _contain(self, variable: Any, **kwargs: Any) -> Any:
        """Puts a variable whose value is reduced over the ranks into a `ReplicaVariable`."""
        strategy = self._container_strategy()
        aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
        synchronization = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
        if synchronization not in _SYNCHRONIZATIONS or aggregation not in list(tf.VariableAggregation):
            raise ConfigurationError(
                message(
                    "Replicas cannot keep a variable with this synchronization and aggregation.",
                    hint="use AUTO, ON_WRITE or ON_READ, and a tf.VariableAggregation.",
                    name=variable.name,
                    synchronization=synchronization,
                    aggregation=aggregation,
                )
            )
        if synchronization == tf.VariableSynchronization.ON_READ:
            return SyncOnReadVariable(strategy, [variable], aggregation)
        if aggregation != tf.VariableAggregation.NONE:
            return MirroredVariable(strategy, [variable], aggregation)
        return variable

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        strategy, rank = self._container_strategy(), self._communicator.rank
        with tf.device(self._device), ProcessReplicaContext(strategy, rank), own_random_operations(rank):
            return fn(*args, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        dense = [v for v in flat if not isinstance(v, tf.IndexedSlices)]
        reduced = iter(self._communicator.all_reduce(dense, _op_name(reduce_op)))
        return tf.nest.pack_sequence_as(
            value, [self._reduce_slices(reduce_op, v) if isinstance(v, tf.IndexedSlices) else next(reduced) for v in flat]
        )

    def _reduce_slices(self, reduce_op: Any, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        values = self._communicator.all_gather(slices.values)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            values = values / self._communicator.size
        return tf.IndexedSlices(values, self._communicator.all_gather(slices.indices), slices.dense_shape)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.MEAN:
            return value

        def local(v: Any) -> Any:
            if isinstance(v, DistributedVariable):
                v = v.values[0]
            return v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)

        return self._replica_ctx_all_reduce(reduce_op, tf.nest.map_structure(local, value))

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        if isinstance(var, ShardedWeight):  # Its part has another shape.
            result = fn(var, *args, **kwargs)
            return result if group else (result,)
        return super()._update(self._local_results(var)[0], fn, args, kwargs, group)

    def _replica_ctx_update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        return self._update(var, fn, args, kwargs, group)  # Without a merge call, an update may be inside `tf.cond`.

    def _update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        def update(*args: Any, **kwargs: Any) -> Any:
            with UpdateContext(0):  # The id of the replica to read from. TensorFlow's method passes a device here.
                return fn(*args, **kwargs)

        return super()._update_non_slot(colocate_with, update, args, kwargs, group)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return value.values if isinstance(value, DistributedVariable) else (value,)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        value = tf.convert_to_tensor(value)
        order = [axis] + [i for i in range(value.shape.rank) if i != axis]
        back = [order.index(i) for i in range(value.shape.rank)]
        return tf.transpose(self.gather_over_replicas(tf.transpose(value, order)), back)

    @property
    def compiles_whole_steps(self) -> bool:
        # Other communicators add operations to the graph even for a single process.
        return type(self._communicator) is SingleCommunicator

    def whole_batch(self, shards: Shards) -> Any:
        return self.gather_batch(shards.parts[0])

    def mean_over_processes(self, own_gradients: Sequence[Any]) -> list[Any]:
        """Averages gradients that every process computed outside replicas.

        The gradients are equal if all processes read the same data. If not, their mean keeps the weights equal.
        """
        share = Share.equal(self._num_replicas_in_sync)
        weighted = [share.weighted(gradient) for gradient in own_gradients]
        means = gradients.aggregate(
            [None if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in weighted],
            all_reduce=self.sum_over_replicas,
            all_gather=self.gather_over_replicas,
            bucket_bytes=self.bucket_bytes_for(own_gradients),
        )
        for i, own in enumerate(weighted):
            if isinstance(own, tf.IndexedSlices):
                of_all = self._reduce_slices(tf.distribute.ReduceOp.SUM, own)
                means[i] = gradients.summed_where_alike(of_all, self._num_replicas_in_sync)
        return means

    def bucket_bytes_for(self, tensors: Sequence[Any]) -> int:
        return self.strategy.bucket_bytes or self._communicator.bucket_bytes

    def _new_transport(self) -> Transport:
        transport = self._between(self._communicator)
        transport.groups = {axis: self._between(self._own_of(groups)) for axis, groups in self.groups.items()}
        return transport

    def _own_of(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Makes groups of ranks, and returns the communicator of the group that has this rank. All ranks call it."""
        made = [self._communicator.subgroup(ranks) for ranks in groups]
        return next(each for each in made if each is not None)

    def _between(self, communicator: Communicator) -> BetweenProcesses:
        return BetweenProcesses(communicator, self._device, self.of_gradients)

    def in_groups(self, shards: Shards) -> Shards:
        transport: Any = self.transport
        group = transport.groups.get(MODEL, transport).communicator
        return shards._replace(parts=(map_rows(lambda rows: gathered(rows, group), shards.parts[0]),))

    def rows_before(self, count: tf.Tensor) -> tf.Tensor:
        of_groups = self._communicator.all_gather(count[tf.newaxis])[:: self.model_size]
        return tf.reduce_sum(of_groups[: self._communicator.rank // self.model_size])

    def communicator_of(self, replica: int) -> Communicator:
        return self._communicator

    def own_communicator(self) -> Communicator:
        return self._communicator

    def shard(self, batch: Any) -> Shards:
        if self.strategy.rank_data != "own":
            return super().shard(batch)
        batch = as_tensors(batch)
        spec = with_all_open(batch)
        agreement = self._agreement(stop_together=False)
        sizes = open_sizes(spec, batch)
        total, _, alike, sizes = agreement.next_step(tf.constant(True), num_examples(batch), all_alike([batch]), sizes)
        return Shards((with_open_sizes(spec, batch, sizes),), total, alike)

    def known_rows(self, batch: Any) -> KnownRows:
        known = super().known_rows(batch)
        if not self.keeps_own_rows:
            return known
        alike = not self.any_process(not known.alike)
        return KnownRows(alike, are_apart=not alike)

    @property
    def keeps_own_rows(self) -> bool:  # type: ignore[override]
        return bool(self.strategy.rank_data == "own")

    def gather_outputs(self, outputs: Any) -> Any:
        if self.keeps_own_rows:
            return outputs
        return tf.nest.map_structure(lambda value: gathered(value, self._communicator), outputs)

    def kept_outputs(self, outputs: Any) -> Any:
        if self.is_chief or not self.predictions_on_chief_only:
            return outputs
        return tf.nest.map_structure(without_rows, outputs)

    def means(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        return self._communicator.all_reduce([variable.values[0].value() for variable in variables], "mean")

    def take_from_first(self, model: Any) -> None:
        kept = SyncOnReadVariable, PartVariable
        variables = [v for v in in_sync.variables_of(model) if not isinstance(in_sync.of_tensorflow(v), kept)]
        ranks = self.all_gather_object(in_sync.replica_checksums(variables, 1)[0])
        self.broadcast_variables([variables[i] for i in in_sync.places_of_differing(ranks)])

    def synchronize_new_variables(self) -> None:
        """Gives variables made since the last call the values of rank 0, also while a function is traced: the function runs next.

        Ranks that load a model from their own files may make its variables in different orders. Then they are matched by name.

        Raises:
            DesyncError: The ranks made different variables. The message names the first, with its shape on each rank.
        """
        if not self.new_variables:
            return
        with tf.init_scope():
            new, self.new_variables = self.new_variables, []
            made = [in_sync.described(variable) for variable in new]
            if in_sync.are_in_other_orders(self._communicator.all_gather_object(made)):
                new.sort(key=in_sync.described)
            # Variables that are summed over ranks are left out: rank 0 holds their value, the other ranks hold zero. Parts were
            # cut from values that are equal on all ranks.
            self._broadcast_values([v for v in new if not is_sum(v) and not isinstance(v, PartVariable)])

    @contextlib.contextmanager
    def acting_alone(self) -> Iterator[None]:
        before, self.new_variables = self.new_variables, []
        self._acts_alone = True
        try:
            yield
        finally:
            self.new_variables, self._acts_alone = before, False

    def initial_on_all(self, value: tf.Tensor) -> tf.Tensor:
        described = f"{value.dtype.name}{value.shape}"
        of_all = self.all_gather_object(described)
        if len(set(of_all)) > 1:
            raise DesyncError(
                message(
                    "Ranks make different variables.",
                    hint="make the same variables in the same order on all ranks.",
                    code="TFREP-E021",
                    weights=of_all,
                )
            )
        return self._communicator.broadcast([value])[0]

    def collect_parts(self, reads: bool = True) -> None:
        kept, sums, firsts = self.own_of_replicas(_A.NONE, _A.SUM, _A.ONLY_FIRST_REPLICA)
        is_root = self._communicator.rank == 0
        for variable in kept:
            if isinstance(variable, PartVariable):
                variable.hold_whole(reads)
        totals = self._communicator.all_reduce([v.values[0].value() for v in sums])
        for variable, total in zip(sums, totals, strict=True):
            variable.values[0].assign(total if is_root else tf.zeros_like(total))
        first_values = self._communicator.broadcast([v.values[0].value() for v in firsts])
        for variable, value in zip(sums + firsts, totals + first_values, strict=True):
            variable.held = value.numpy() if reads and not is_root else None

    def release_parts(self) -> None:
        for variable in self.replica_variables.values():
            variable.held = None

    @contextlib.contextmanager
    def summed_at_once(self, variables: Sequence[Any]) -> Iterator[None]:
        sums = [v for v in variables if isinstance(v, ReplicaVariable) and is_sum(v)]
        if self.reads_alone or not sums:
            yield
            return
        with self.watching_peers():
            totals = self._reduce_in_function([v.values[0].value() for v in sums])
        self.totals = {id(variable): total for variable, total in zip(sums, totals, strict=True)}
        try:
            yield
        finally:
            self.totals = {}

    def any_process(self, wish: bool) -> bool:
        with self.watching_peers():
            return bool(self._reduce_in_function([tf.constant(wish)], "max")[0])

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        own = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
        parts = [v for v in own if isinstance(v, PartVariable)]
        self._broadcast_values([v for v in own if not is_sum(v) and not isinstance(v, PartVariable)])
        for variable, is_assigned in zip(parts, self.broadcast_object([v.assigned_alone for v in parts]), strict=True):
            if is_assigned:
                variable.take_from_first()
        for variable in own if self._communicator.rank else []:
            if is_sum(variable):  # Rank 0 holds the whole sum.
                variable.values[0].assign(tf.zeros_like(variable.values[0]))

    def _broadcast_values(self, variables: Sequence[Any]) -> None:
        """Gives variables the values of rank 0, in pieces of about `_PART_BYTES`: only one piece is in memory twice."""
        local = [v.values[0] if hasattr(v, "values") else v for v in variables]
        numeric = [v for v in local if v.dtype != tf.string]
        small = [v for v in numeric if _bytes(v) <= _PART_BYTES]
        for members in gradients.buckets(range(len(small)), small, _PART_BYTES):
            values = self._communicator.broadcast([small[i].value() for i in members])
            for i, value in zip(members, values, strict=True):
                small[i].assign(value)
        for variable in [v for v in numeric if _bytes(v) > _PART_BYTES]:
            rows = max(1, _PART_BYTES * variable.shape[0] // _bytes(variable))
            for start in range(0, variable.shape[0], rows):
                end = min(start + rows, variable.shape[0])
                value = self._communicator.broadcast([variable[start:end]])[0]
                tf.raw_ops.ResourceStridedSliceAssign(ref=variable.handle, begin=[start], end=[end], strides=[1], value=value)

    def shortest_epoch(self, num_batches: int) -> int:
        return shortest(self._communicator.all_gather_object(num_batches))

    def begin_call(self, settings: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        if self._communicator.size == 1:
            return
        given = Fingerprint({**settings, **(arrays if self.strategy.rank_data == "same" else {})})
        refuse_difference(self._communicator, given, share_random_state(self._communicator, given.digest))

    def check_same(self, given: Fingerprint) -> None:
        if self._communicator.size > 1 and self.strategy.rank_data == "same":
            compare(self._communicator, given)

    def broadcast_object(self, value: Any) -> Any:
        return self._communicator.broadcast_object(value)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._communicator.all_gather_object(value)

    def barrier(self) -> None:
        self._communicator.barrier()

    def note_call(self, what: str) -> None:
        self._communicator.note_call(what)

    def watching_peers(self) -> contextlib.AbstractContextManager[None]:
        return getattr(self._communicator, "watching", contextlib.nullcontext)()

    def value_of_first_replica(self, local: tf.Tensor) -> tf.Tensor:
        return self._communicator.broadcast([local])[0]

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        # TensorFlow calls this to give all replicas the value of the first.
        if isinstance(tensor, tf.IndexedSlices):
            gather = self._communicator.all_gather  # The number of rows may differ between ranks.
            rows = gather(tf.shape(tensor.indices))[0]
            return tf.IndexedSlices(gather(tensor.values)[:rows], gather(tensor.indices)[:rows], tensor.dense_shape)
        return self._communicator.broadcast([tf.convert_to_tensor(tensor)])[0]

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> distribution.ReplicaDataset:
        replicas = self.local_replicas(stop_together=False)
        whole = functools.partial(distribution.distribute, replicas=replicas, options=options, most=self.reads_at_most.value)
        return distribute(self._container_strategy(), dataset, self._in_one_order, whole)

    def _in_one_order(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a data set with equal elements on all ranks, as far as they are known before it is read."""
        check_order(dataset, self._communicator)
        length = int(dataset.cardinality())
        shortest = self.shortest_epoch(length)
        # If all lengths are equal, the data is read to its end as on one device: there, `repeat` draws another order for `shuffle`.
        if shortest != length:
            dataset = dataset.take(shortest) if shortest >= 0 else dataset.filter(lambda *_: True)  # Makes its length unknown.
        in_order = tf.data.Options()
        in_order.deterministic = True
        return dataset.with_options(in_order)

    def _agreement(self, stop_together: bool) -> Agreement:
        c = self._communicator
        return Agreement(c.rank, c.size, lambda counts: c.all_reduce([counts], "sum")[0], stop_together)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return value_fn(ValueContext(self._communicator.rank, self._communicator.size))

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._communicator.rank

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._communicator.size

    @property
    def should_checkpoint(self) -> bool:
        return self._communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        return self._communicator.rank == 0


def _bytes(variable: Any) -> int:
    return (variable.shape.num_elements() or 0) * variable.dtype.size


def _op_name(reduce_op: Any) -> str:
    return "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "sum"
