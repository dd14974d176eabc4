"""`MirroredStrategy`: the replicas are the devices of one process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.devices import identity_of_gpu, logical_devices, nccl_connects, warn_if_shared, warn_of_unseen_gpus
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.events import say_strategy
from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.local import LocalGroup
from tfrep_strategy.core.step import Shards
from tfrep_strategy.core.tf import (
    NCCL_DTYPES,
    DistributedValues,
    MirroredExtended,
    MirroredVariable,
    NcclAllReduce,
    ReductionToOneDevice,
    runtime_has_started,
    without_rewriting,
)
from tfrep_strategy.core.validation import MOST_PROCESSES, checked
from tfrep_strategy.data.batches import concatenate, map_rows
from tfrep_strategy.errors import ConfigurationError, check_count, message, shown, warn
from tfrep_strategy.partitioner.between_replicas import Groups, WithinProcess
from tfrep_strategy.partitioner.emitter import Transport
from tfrep_strategy.strategies import in_sync
from tfrep_strategy.strategies.base import GradientAggregator, GradientTransformer, SynchronousStrategy
from tfrep_strategy.strategies.extended import SynchronousExtended
from tfrep_strategy.strategies.groups import ReplicaGroup, check_members
from tfrep_strategy.strategies.logical_devices import LogicalDevices
from tfrep_strategy.strategies.replica_context import DeviceReplicaContext
from tfrep_strategy.strategies.settings import CheckedSetting, mapping, positive
from tfrep_strategy.strategies.variables import ShardedWeight

_THREADS_PER_REPLICA = 2


def use_logical_cpus(n: int) -> list[str]:
    """Splits the CPU into logical devices, to run several replicas on a machine without accelerators.

    Args:
        n: The number of logical devices.

    Returns:
        Their names, `["CPU:0", "CPU:1", ...]`.

    Raises:
        ConfigurationError: `n` is below 1, or TensorFlow was initialized with another number.

    Example:
        >>> use_logical_cpus(2)
        ['CPU:0', 'CPU:1']
    """
    check_count("At least one logical CPU is needed.", 1, MOST_PROCESSES, n=n)
    cpu = tf.config.list_physical_devices("CPU")[0]
    _ensure_threads(n)
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:
        present = len(tf.config.list_logical_devices("CPU"))
        if present != n:
            raise ConfigurationError(
                message(
                    f"TensorFlow is already initialized, with {present} logical CPU(s).",
                    hint="call use_logical_cpus before TensorFlow is used; in a notebook, restart the kernel first.",
                    code="TFREP-E004",
                    n=n,
                )
            ) from error
    return [f"CPU:{i}" for i in range(n)]


def _ensure_threads(replicas: int) -> None:
    """Gives every replica threads. Collectives within a process deadlock if they cannot all run at once.

    Idle threads still wake up: more than needed cost a tenth of a small step. A single replica waits for no other one.
    """
    if replicas == 1:
        return
    if "TF_NUM_INTEROP_THREADS" in os.environ or tf.config.threading.get_inter_op_parallelism_threads():
        return
    if not runtime_has_started():
        tf.config.threading.set_inter_op_parallelism_threads(max(_THREADS_PER_REPLICA * replicas, os.cpu_count() or 1))


class MirroredStrategy(SynchronousStrategy):
    """Synchronous training on the devices of this process, with the answer that one device gives.

    Args:
        devices: Device names such as `["GPU:0", "GPU:1"]`. Default: all GPUs, or all logical CPUs where there are none.
        devices_per_replica: Number of devices of each replica. The first ones belong to replica 0. See
            `logical_device_for_variables` and `tfrep.logical_device`.
        keras_layer_placement: The logical device of Keras layers, by name, for models that do not place their layers.
        bucket_bytes: Gradients are summed in buckets of about this many bytes. On GPUs, NCCL sums each bucket at once. On
            CPUs the buckets only determine the order.
        compression: `"bf16"` or `"fp16"`: gradients travel between the devices as 16-bit floats, half the bytes, and are summed
            in float32. The sum that all replicas get has 16 bits, too. Default: None, which changes no bit.
        densify_sparse_gradients: Whether sparse gradients are sent as dense tensors.
        gradient_transformers: Functions that change the global gradients before the optimizer uses them.
        gradient_aggregator: Replaces the aggregation of gradients; see `SynchronousStrategy`.
        check_sync_every: Number of steps of `fit` between two checks that all replicas hold the same values.
        shard_optimizer_state: Whether each replica keeps its part of the optimizer's slots only, and updates its part of the
            weights (ZeRO-1). The answer and the files are the same.
        shard_weights: Whether each replica keeps its part of the weights only, too, and gathers them where a layer reads them
            (ZeRO-3, FSDP). It needs `shard_optimizer_state`.
        shard_weights_min_bytes: Weights of fewer bytes stay whole.
        batch_statistics: `"global"`: `BatchNormalization` takes the mean and the variance of the global batch, as one device does.
            `"replica"`: each replica takes those of its rows, without waiting for the others. The answer then depends on the number
            of replicas; see docs/speed.md.
        allow_plain_models: Whether models that were made outside the scope train without a warning. One device trains such a model.
        partition_functions: Whether replicas share the work of your own `tf.function`s as if `tfrep.partition` wrapped them. Such a
            function is called in the scope, gets or draws rows, and writes variables.

    Every argument is an attribute, too. Those that name devices, `devices_per_replica`, `shard_optimizer_state`,
    `shard_weights`, `shard_weights_min_bytes` and `batch_statistics` are fixed; the others can be set before the next step.

    Raises:
        ConfigurationError: A device does not exist or is named twice, or a setting cannot be used.

    Example:
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        devices_per_replica: int = 1,
        keras_layer_placement: Mapping[str, int] | None = None,
        bucket_bytes: int = 32 << 20,
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
    ) -> None:
        _warn_among_processes()
        self._set(
            bucket_bytes=bucket_bytes,
            compression=compression,
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
            devices_per_replica=devices_per_replica,
            keras_layer_placement=keras_layer_placement or {},
        )
        if shard_optimizer_state and self.devices_per_replica > 1:
            raise ConfigurationError(
                message(
                    "The optimizer's state can be sharded only if each replica has one device.",
                    hint="leave out devices_per_replica, or shard_optimizer_state.",
                    shard_optimizer_state=shard_optimizer_state,
                    devices_per_replica=devices_per_replica,
                )
            )
        names = _resolve(devices)
        self.devices = [name.removeprefix("/device:") for name in names]
        super().__init__(_Extended(self, LogicalDevices(names, devices_per_replica, self.keras_layer_placement)))
        uses_nccl = isinstance(self.extended._cross_device_ops, NcclAllReduce)
        kind = self.devices[0].partition(":")[0]
        say_strategy(self.num_replicas_in_sync, "in this process", kind, "nccl" if uses_nccl else "")

    devices = CheckedSetting(fixed=True, of_run=True)
    devices_per_replica = CheckedSetting(positive("devices"), fixed=True)
    keras_layer_placement = CheckedSetting(mapping, fixed=True)

    # TensorFlow numbers the collectives of every strategy from the same base. Each of ours gets another base.
    _collective_key_base = 0
    _instances = 0

    def logical_device_for_variables(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Puts variables that are created inside on one logical device of each replica.

        Args:
            index: 0 to `devices_per_replica - 1`.

        Raises:
            ConfigurationError: A replica does not have the device.

        Example:
            >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2)
            >>> with strategy.scope(), strategy.logical_device_for_variables(1):
            ...     tf.Variable(1.0).device.rpartition("device:")[2]
            'CPU:1'
        """
        return self.extended.logical_devices.for_variables(index)

    def new_group(self, replicas: Sequence[int]) -> ReplicaGroup:
        group = LocalGroup(self, check_members(replicas, self.num_replicas_in_sync))
        return ReplicaGroup(self, group.members, group.communicator)


class _Extended(SynchronousExtended, MirroredExtended):
    def __init__(self, strategy: MirroredStrategy, logical_devices: LogicalDevices) -> None:
        _ensure_threads(len(logical_devices.of_replica))
        self.logical_devices = logical_devices
        MirroredStrategy._instances += 1
        strategy._collective_key_base = 1_000_000 * MirroredStrategy._instances
        super().__init__(strategy, devices=[devices[0] for devices in logical_devices.of_replica])
        self.num_local_replicas = len(self._devices)
        gpus = [identity_of_gpu(device) for device in self._devices]
        self._one_device = ReductionToOneDevice()
        self._cross_device_ops = NcclAllReduce() if nccl_connects(gpus) else self._one_device
        warn_if_shared(gpus)
        self._init_state()

    @functools.cached_property
    def _all_replicas(self) -> LocalGroup:
        return LocalGroup(self.strategy, range(self.num_local_replicas))

    def _new_transport(self) -> Transport:
        transport = self._transport_of(range(self.num_local_replicas))
        transport.groups = {axis: Groups(each, list(map(self._transport_of, each))) for axis, each in self.groups.items()}
        return transport

    def _transport_of(self, replicas: Sequence[int]) -> WithinProcess:
        devices = [self.logical_devices.of_replica[replica] for replica in replicas]
        return WithinProcess(devices, LocalGroup(self.strategy, replicas).nccl, self.of_gradients)

    def in_groups(self, shards: Shards) -> Shards:
        parts, size = shards.parts, self.model_size
        groups = [map_rows(lambda *rows: concatenate(rows), *parts[first : first + size]) for first in range(0, len(parts), size)]
        return shards._replace(parts=tuple(group for group in groups for _ in range(size)))

    def communicator_of(self, replica: int) -> Communicator:
        return self._all_replicas.communicator(replica)

    @contextlib.contextmanager
    def partitioned_by(self, steps: Any, compiled: bool) -> Iterator[None]:
        rewrites = compiled or self._rewrites_graphs  # XLA would put constants that replicas share on all their devices.
        with super().partitioned_by(steps, compiled), contextlib.nullcontext() if rewrites else without_rewriting():
            yield

    @functools.cached_property
    def _rewrites_graphs(self) -> bool:
        """Whether TensorFlow rewrites the graph of a step.

        It would rewrite the graph of all replicas at once, at a more than proportional cost: the first step of a ResNet-50 on 8
        CPUs took twice as long, and no step was faster. With two CPUs a step with batch normalization takes a tenth less time. On
        GPUs the layout of convolutions depends on it.
        """
        on_gpus = any("GPU" in each for each in self.worker_devices)
        return on_gpus or len(self.worker_devices) <= 2 or any(tf.config.optimizer.get_experimental_options().values())

    def whole_batch(self, shards: Shards) -> Any:
        return map_rows(lambda *rows: concatenate(rows), *shards.parts)

    def gather_outputs(self, outputs: Any) -> Any:
        return tf.nest.map_structure(lambda v: concatenate(self.strategy.experimental_local_results(v)), outputs)

    def take_from_first(self, model: Any) -> None:
        for variable in map(in_sync.of_tensorflow, in_sync.variables_of(model)):
            if isinstance(variable, MirroredVariable):
                for copy in variable.values[1:]:
                    copy.assign(variable.values[0])

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if isinstance(var, ShardedWeight):  # Its parts have other shapes.
            result = fn(var, *args, **kwargs)
            return result if group else (result,)
        return super()._update(var, fn, args, kwargs, group)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        placement = self.logical_devices.placement()
        if placement is not None and kwargs.get("colocate_with") is None:
            kwargs["colocate_with"] = placement
        return super()._create_variable(next_creator, **kwargs)

    # Each replica updates its own copy of a variable, with the same global gradient. So no merge call is needed, and an update may
    # be inside `tf.cond`.
    def _use_merge_call(self) -> bool:
        return False

    def _get_cross_device_ops(self, value: Any) -> Any:
        values = value.values if isinstance(value, DistributedValues) else [value]
        dtypes = {tf.as_dtype(v.dtype) for v in values}
        return self._cross_device_ops if dtypes <= NCCL_DTYPES - {tf.int32} else self._one_device

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if tf.is_tensor(tensor) and isinstance(destinations, DistributedValues):
            # TensorFlow's method first tests the truth of the destinations; for a variable this tests its value.
            return self._get_cross_device_ops(tensor).broadcast(tensor, destinations)
        return super()._broadcast_to(tensor, destinations)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        def replica_fn(*args: Any, **kwargs: Any) -> Any:
            replica_id = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            with DeviceReplicaContext(self._container_strategy(), replica_id):
                return fn(*args, **kwargs)

        if hasattr(fn, "python_function"):  # For a tf.function, TensorFlow traces one function around all replicas.
            return super()._call_for_each_replica(fn, args, kwargs)
        return super()._call_for_each_replica(replica_fn, args, kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        communicator = self.own_communicator()
        op = "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "sum"
        flat = tf.nest.flatten(value)
        reduced = iter(communicator.all_reduce([v for v in flat if not isinstance(v, tf.IndexedSlices)], op))

        def reduced_slices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
            rows = communicator.all_gather(slices.values)
            rows = rows / communicator.size if op == "mean" else rows
            return tf.IndexedSlices(rows, communicator.all_gather(slices.indices), slices.dense_shape)

        results = [reduced_slices(v) if isinstance(v, tf.IndexedSlices) else next(reduced) for v in flat]
        return tf.nest.pack_sequence_as(value, results)


def _warn_among_processes() -> None:
    """Warns if this process is one of several, because it would train without the others."""
    with contextlib.suppress(ConfigurationError):  # Variables that cannot be read do not describe a run.
        environment = detect_environment()
        if environment.size > 1:
            warn(
                f"This process is one of {environment.size}, but a MirroredStrategy trains on its own devices only.\n"
                f"Hint: MultiWorkerStrategy() trains with the others. Environment: {environment.describe()}",
            )


def _resolve(devices: Sequence[str] | None) -> list[str]:
    known = [d.name for kind in ("GPU", "CPU") for d in logical_devices(kind)]
    if devices is None:
        gpus = [name for name in known if "GPU" in name]
        if not gpus:
            warn_of_unseen_gpus()
        return gpus or known
    devices = checked(list[str], "devices", devices, hint='name devices, such as ["GPU:0", "GPU:1"].')
    short = {name.removeprefix("/device:"): name for name in known}
    resolved = []
    for device in devices:
        name = short.get(device.upper().rpartition("DEVICE:")[2].lstrip("/"))
        if name is None:
            raise ConfigurationError(
                message(
                    f"There is no device {shown(device)}.",
                    hint=f"this process has {', '.join(short)}; tfrep.use_logical_cpus(n) makes more CPUs.",
                    code="TFREP-E010",
                    devices=devices,
                )
            )
        resolved.append(name)
    if not resolved or len(set(resolved)) != len(resolved):
        raise ConfigurationError(message("Each replica needs its own device.", hint="name each device once.", devices=devices))
    return resolved
