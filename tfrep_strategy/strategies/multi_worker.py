"""`MultiWorkerStrategy`: one replica in each process, on one machine or several."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.devices import full_name, replica_device, take_own_gpu
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.events import say_strategy
from tfrep_strategy.cluster.hardware import THREADS_VARIABLE, is_bound, threads_of_rank
from tfrep_strategy.cluster.resolver import resolver_of
from tfrep_strategy.cluster.watcher import start_watcher
from tfrep_strategy.communicators import Communicator, SingleCommunicator, make_communicator
from tfrep_strategy.communicators.peers.checked import watched
from tfrep_strategy.core.tf import runtime_has_started
from tfrep_strategy.strategies.base import GradientAggregator, GradientTransformer, SynchronousStrategy
from tfrep_strategy.strategies.groups import ReplicaGroup, check_members, remember
from tfrep_strategy.strategies.in_sync import share_random_state
from tfrep_strategy.strategies.operations import cache_in_own_files, order_loops_that_draw
from tfrep_strategy.strategies.packages import let_the_chief_decide
from tfrep_strategy.strategies.process_extended import ProcessExtended
from tfrep_strategy.strategies.settings import CheckedSetting, one_of, or_none, positive


class MultiWorkerStrategy(SynchronousStrategy):
    """Synchronous training with one replica in each process, with the answer that one device gives.

    Args:
        communicator: `"horovod"`, `"tf"` (TensorFlow's own collectives), `"mpi"`, `"shared_memory"` (ranks of one machine),
            `"auto"` (shared memory for ranks of one machine without GPUs, else TensorFlow's if the environment knows the
            address of every process, else Horovod or MPI), a name of `register_communicator`, or a
            `Communicator` of all processes.
        device: Device of this process's replica, such as `"GPU:0"`. Default: a GPU, or the CPU if there is none. If the
            processes see several GPUs, each takes one by its local rank, and shows TensorFlow only this one.
        bucket_bytes: Gradients are sent in buckets of about this many bytes. Default: depends on the transport.
        compression: `"bf16"` or `"fp16"`: gradients travel as 16-bit floats, half the bytes, and are summed in float32. The
            sum that all replicas get has 16 bits, too. Default: None, which changes no bit.
        densify_sparse_gradients: Whether sparse gradients are sent as dense tensors.
        gradient_transformers: Functions that change the global gradients before the optimizer uses them.
        gradient_aggregator: Replaces the aggregation of gradients; see `SynchronousStrategy`.
        check_sync_every: Number of steps of `fit` between two checks that all ranks hold the same values.
        shard_optimizer_state: Whether each replica keeps its part of the optimizer's slots only, and updates its part of the
            weights (ZeRO-1). The answer and the files are the same.
        shard_weights: Whether each replica keeps its part of the weights only, too, and gathers them where a layer reads them
            (ZeRO-3, FSDP). It needs `shard_optimizer_state`.
        shard_weights_min_bytes: Weights of fewer bytes stay whole.
        batch_statistics: `"global"`: `BatchNormalization` takes the mean and the variance of the global batch, as one device does.
            `"replica"`: each replica takes those of its rows, without waiting for the others. The answer then depends on the number
            of replicas; see docs/speed.md.
        allow_plain_models: Whether models that were made outside the scope may train. Each rank trains such a model alone; by
            default it is refused.
        partition_functions: Whether replicas share the work of your own `tf.function`s as if `tfrep.partition` wrapped them. Such a
            function is called in the scope, gets or draws rows, and writes variables.
        rank_data: The relation between the data that the ranks pass to `fit`, `evaluate`, `predict` and
            `experimental_distribute_dataset`. `"same"`: all ranks pass the same data, and each takes its part of every
            batch. A sample is compared; a difference is an error. `"unchecked"`: the same, without the comparison.
            `"own"`: each rank passes its own part of the data, as in `fit(x[rank::size])`. A step then reads
            `batch_size / size` examples on each rank. An epoch lasts until the last rank has read its data. `predict`
            returns to each rank the predictions for its own rows.

    Every argument is an attribute, too. `communicator` (the object), `device`, `shard_optimizer_state`, `shard_weights`,
    `shard_weights_min_bytes` and `batch_statistics` are fixed. The others can be set before the next step, and `rank_data` before
    the next `fit` or `predict`.

    Raises:
        ConfigurationError: The communicator or another setting is unknown, the communicator connects other processes than the
            environment describes, a device does not exist, or the environment does not describe the processes.
        PeerError: Another process cannot be reached.

    Example:
        >>> strategy = MultiWorkerStrategy()  # alone: one replica
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        communicator: str | Communicator = "auto",
        device: str | None = None,
        *,
        bucket_bytes: int | None = None,
        compression: str | None = None,
        densify_sparse_gradients: bool = False,
        gradient_transformers: Sequence[GradientTransformer] = (),
        gradient_aggregator: GradientAggregator | None = None,
        check_sync_every: int | None = None,
        shard_optimizer_state: bool = False,
        shard_weights: bool = False,
        shard_weights_min_bytes: int = 65536,
        batch_statistics: str = "global",
        allow_plain_models: bool = False,
        partition_functions: bool = True,
        rank_data: str = "same",
    ) -> None:
        self._set(
            densify_sparse_gradients=densify_sparse_gradients,
            gradient_transformers=gradient_transformers,
            gradient_aggregator=gradient_aggregator,
            check_sync_every=check_sync_every,
            shard_optimizer_state=shard_optimizer_state,
            shard_weights=shard_weights,
            shard_weights_min_bytes=shard_weights_min_bytes,
            batch_statistics=batch_statistics,
            allow_plain_models=allow_plain_models,
            partition_functions=partition_functions,
            rank_data=rank_data,
            compression=compression,
            bucket_bytes=bucket_bytes,
        )
        environment = detect_environment()
        place = communicator if isinstance(communicator, Communicator) else environment
        _share_cores(place.local_size)
        if device is None:
            take_own_gpu(place.local_rank, place.local_size)
        watch = functools.partial(start_watcher, "Rank {}")
        self.communicator = watched(make_communicator(communicator, environment, device), environment.hosts, watch)
        name = full_name(device or replica_device(self.communicator.local_rank))
        self.device = name.rpartition("device:")[2]
        super().__init__(ProcessExtended(self, self.communicator, name))
        share_random_state(self.communicator)
        self.extended.environment = environment
        self.extended._cluster_resolver = resolver_of(environment)
        cache_in_own_files(self.communicator.rank, self.communicator.size)
        order_loops_that_draw(self.communicator.size)
        remember(self)
        let_the_chief_decide(self.communicator.rank, self.communicator.size)
        if self.communicator.rank == 0:
            hosts = set(environment.hosts)
            where = "on this machine" if len(hosts) == 1 else f"on {'several' if '' in hosts else len(hosts)} machines"
            say_strategy(self.communicator.size, where, self.device.partition(":")[0], self.communicator.name)

    bucket_bytes = CheckedSetting(or_none(positive("bytes")))
    communicator = CheckedSetting(fixed=True, of_run=True)
    device = CheckedSetting(fixed=True, of_run=True)
    rank_data = CheckedSetting(one_of("same", "unchecked", "own"))

    @property
    def rank(self) -> int:
        """The number of this process, and of its replica: 0 to `num_replicas_in_sync - 1`."""
        return self.communicator.rank

    def scope(self) -> Any:
        """Returns a context manager in which variables belong to this strategy; see `tf.distribute.Strategy.scope`.

        Variables made inside get rank 0's values when the outermost scope ends, or when a step runs before.
        """
        return super().scope() if self._is_one_replica else _Scope(self, super().scope())

    def new_group(self, replicas: Sequence[int]) -> ReplicaGroup:
        members = check_members(replicas, self.num_replicas_in_sync)
        own = self.communicator.subgroup(members) or SingleCommunicator()
        return ReplicaGroup(self, members, lambda replica: own)


def _share_cores(ranks: int) -> None:
    """Lets the ranks of a machine share its cores, unless the user has set threads or a launcher has bound each rank to cores."""
    settings = tf.config.threading
    if ranks == 1 or THREADS_VARIABLE in os.environ or settings.get_intra_op_parallelism_threads() or is_bound():
        return
    if not runtime_has_started():
        settings.set_intra_op_parallelism_threads(threads_of_rank(ranks))


class _Scope:
    """Enters TensorFlow's scope. When the outermost scope ends, it gives the new variables rank 0's values."""

    def __init__(self, strategy: MultiWorkerStrategy, scope: Any) -> None:
        self._strategy = strategy
        self._scope = scope

    def __enter__(self) -> Any:
        self._strategy.extended.open_scopes += 1
        return self._scope.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        result = self._scope.__exit__(kind, error, traceback)
        self._strategy.extended.open_scopes -= 1
        if kind is None and not self._strategy.extended.open_scopes:
            self._strategy.extended.synchronize_new_variables()
        return result
