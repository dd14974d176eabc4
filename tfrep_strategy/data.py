"""Who reads what: every process its parts of one pipeline, or pipelines of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy._tensorflow import auto_shard_dataset
from tfrep_strategy.agreement import Agreement
from tfrep_strategy.batches import as_element, cut, in_turn, shard
from tfrep_strategy.distributed_iterator import Pipeline, Reading, ReplicaIterator, host_of, support_loops
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.fingerprints import FirstBatch
from tfrep_strategy.keras_integration.protocol import Shards

_PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA
_STEPS_AHEAD = 2
"""How many steps are cut before they are needed."""


class ReplicaDataset(tf.distribute.DistributedDataset):
    """A data set whose elements are steps: one batch for each replica of this process.

    Args:
        pipelines: Either one for all replicas of this process, or one for each.
        reading: How steps are made of what they give.
        cardinality: How many steps there are; negative when that is unknown or infinite, as TensorFlow has it.
    """

    def __init__(self, pipelines: Sequence[Pipeline], reading: Reading, cardinality: int) -> None:
        self._pipelines = tuple(pipelines)
        self._reading = reading
        self.cardinality = cardinality
        self.first_batch: FirstBatch | None = None
        """What compares the first batch of data that every process reads whole."""
        self.steps_per_batch: int | None = 1
        """How many steps a batch of the data set that was distributed makes; None where nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        iterators = tuple(pipeline.start() for pipeline in self._pipelines)
        return ReplicaIterator(iterators, self._reading, self.first_batch)

    @property
    def element_spec(self) -> Any:
        """The specification of one step's batch."""
        return self._reading.packed_spec(self._element_specs)

    @property
    def part_spec(self) -> Any:
        """The specification of the batch of this process's first replica."""
        return self._reading.part_specs(self._element_specs)[0]

    @property
    def _element_specs(self) -> list[Any]:
        return [pipeline.dataset.element_spec for pipeline in self._pipelines]

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds `reduce_func(state, batch)` over the steps; a `for` loop in a `tf.function` is such a fold too."""
        if not tf.executing_eagerly():
            return self._reduce_in_graph(initial_state, reduce_func)
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def _reduce_in_graph(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        iterator: Any = iter(self)

        def step(optional: Any, state: Any) -> tuple[Any, Any]:
            state = reduce_func(state, optional.get_value())
            return iterator.get_next_as_optional(), state

        # One step after the other: each reads the next batch.
        start = iterator.get_next_as_optional(), initial_state
        return tf.while_loop(lambda optional, state: optional.has_value(), step, start, parallel_iterations=1)[1]

    def for_keras(self, length_is_known: bool) -> Any:
        """Returns an iterable whose elements are `Shards`, for Keras's training loops.

        Args:
            length_is_known: Whether Keras's loops end after the same number of steps on every process.
        """
        first = self._pipelines[0]
        reads_whole = isinstance(first.dataset.element_spec, Shards)
        agreement = None if reads_whole and length_is_known else self._reading.agreement
        if reads_whole and agreement is None and not first.ahead_to:
            return first.dataset
        reading = Reading(self._reading.devices, agreement, as_shards=True)
        return ReplicaDataset(self._pipelines, reading, self.cardinality)


support_loops(ReplicaDataset)


class LocalReplicas(NamedTuple):
    """The replicas of this process.

    Attributes:
        first: The id of the first one.
        devices: The device of each.
        agreement: How the processes keep in step where each reads data of its own.
    """

    first: int
    devices: tuple[str, ...]
    agreement: Agreement

    @property
    def total(self) -> int:
        """How many replicas all processes have."""
        return self.agreement.size * len(self.devices)


def distribute(
    dataset: tf.data.Dataset, replicas: LocalReplicas, options: tf.distribute.InputOptions | None = None
) -> ReplicaDataset:
    """Spreads a data set of global batches over the replicas.

    Every process reads the same pipeline and takes its parts of each batch, which gives exactly the steps of one device,
    unless the data set's `auto_shard_policy` says otherwise: with `FILE` each process reads files of its own, with `OFF`
    each reads all that the data set has there; their batches are then cut into per-replica ones.

    Args:
        dataset: Of global batches.
        replicas: Those of this process. Their agreement is needed when each process reads data of its own, or where nobody
            knows how many batches there are (`UNKNOWN_CARDINALITY`, on all of them or on none).
        options: Where to, and how far ahead, batches are moved.

    Returns:
        A `ReplicaDataset`.

    Raises:
        ConfigurationError: for options that cannot be followed.
    """
    _check(options)
    if options is not None and options.experimental_replication_mode == _PER_REPLICA:
        raise ConfigurationError(
            message(
                "One data set cannot be read anew by each replica.",
                hint="use distribute_datasets_from_function, or InputReplicationMode.PER_WORKER.",
                experimental_replication_mode=options.experimental_replication_mode,
            )
        )
    agreement, count, cardinality = replicas.agreement, len(replicas.devices), _cardinality(dataset)
    spec = dataset.element_spec
    devices, buffer = _destinations(replicas, options, spec)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if agreement.size > 1 and policy in (policies.FILE, policies.OFF):
        if policy == policies.FILE:
            dataset = auto_shard_dataset(dataset, agreement.size, agreement.rank, replicas.total)
        dataset = in_turn(dataset, lambda batch: [cut(batch, replicas.total, i) for i in range(replicas.total)])
        pipeline = Pipeline(dataset, host_of(devices[0]), devices if buffer else (), buffer)
        own = ReplicaDataset([pipeline], Reading(devices, agreement), int(tf.data.UNKNOWN_CARDINALITY))
        own.steps_per_batch = replicas.total if policy == policies.OFF else None
        return own
    if buffer:
        # Each replica's part is an element, which goes to the device whose turn it is.
        parts = range(replicas.first, replicas.first + count)
        dataset = in_turn(dataset, lambda batch: [shard(batch, replicas.total, part, 1) for part in parts])
    else:
        dataset = _cut_ahead(dataset, lambda batch: shard(batch, replicas.total, replicas.first, count), options)
    may_end_anywhere = agreement.size > 1 and cardinality == tf.data.UNKNOWN_CARDINALITY
    pipeline = Pipeline(dataset, host_of(devices[0]), devices if buffer else (), buffer)
    return ReplicaDataset([pipeline], Reading(devices, agreement if may_end_anywhere else None), cardinality)


def distribute_from_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    replicas: LocalReplicas,
    options: tf.distribute.InputOptions | None = None,
) -> ReplicaDataset:
    """Lets each process, or each replica, read a pipeline of its own.

    Args:
        dataset_fn: Called with a `tf.distribute.InputContext` for each pipeline; returns a data set of per-replica batches.
        replicas: Those of this process.
        options: With `PER_REPLICA` each replica has a pipeline, otherwise each process.

    Returns:
        A `ReplicaDataset`. It ends when the last pipeline does: until then replicas without data get empty batches.

    Raises:
        ConfigurationError: for options that do not go together, or a function that returns no data set.
    """
    _check(options)
    agreement, count = replicas.agreement, len(replicas.devices)
    per_replica = options is not None and options.experimental_replication_mode == _PER_REPLICA
    on_device = options is not None and options.experimental_place_dataset_on_device
    hosts = tuple(map(host_of, replicas.devices))
    places = [(agreement.size, agreement.rank, hosts[0])]
    if per_replica:
        runs_on = replicas.devices if on_device else hosts
        places = [(replicas.total, replicas.first + i, runs_on[i]) for i in range(count)]
    pipelines: list[Pipeline] = []
    for number, index, device in places:
        with tf.device(device):
            dataset = dataset_fn(tf.distribute.InputContext(number, index, replicas.total))
        if not isinstance(dataset, tf.data.Dataset):
            raise ConfigurationError(
                message("The function has to return a tf.data.Dataset.", returned=type(dataset).__name__)
            )
        devices, buffer = _destinations(replicas, options, dataset.element_spec)
        own = devices[len(pipelines) : len(pipelines) + 1] if per_replica else devices
        pipelines.append(Pipeline(dataset, device, own if buffer else (), buffer))
    cardinalities = {_cardinality(pipeline.dataset) for pipeline in pipelines}
    if agreement.size == 1 and cardinalities == {tf.data.INFINITE_CARDINALITY}:  # No replica will ever lack a batch.
        return ReplicaDataset(pipelines, Reading(devices, None), int(tf.data.INFINITE_CARDINALITY))
    return ReplicaDataset(pipelines, Reading(devices, agreement), int(tf.data.UNKNOWN_CARDINALITY))


def _check(options: tf.distribute.InputOptions | None) -> None:
    """Refuses options that TensorFlow's strategies refuse too, or that nothing would follow."""
    if options is None:
        return
    if options.experimental_place_dataset_on_device and options.experimental_replication_mode != _PER_REPLICA:
        raise ConfigurationError(
            message(
                "Only data sets that belong to one replica can be placed on its device.",
                hint="set experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA.",
                experimental_place_dataset_on_device=True,
            )
        )
    if options.experimental_place_dataset_on_device and options.experimental_fetch_to_device:
        raise ConfigurationError(
            message(
                "What a data set on the device gives is there already.",
                hint="set experimental_fetch_to_device=False.",
                experimental_place_dataset_on_device=True,
                experimental_fetch_to_device=True,
            )
        )
    if options.experimental_per_replica_buffer_size < 0:
        raise ConfigurationError(
            message(
                "A buffer has a size of 0 or more.",
                experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size,
            )
        )


def _destinations(
    replicas: LocalReplicas, options: tf.distribute.InputOptions | None, spec: Any
) -> tuple[tuple[str, ...], int]:
    """Returns the device of each replica's batches, and how many are moved there ahead; 0: each when it is needed."""
    devices = replicas.devices
    if options is None:
        ahead = any(tf.DeviceSpec.from_string(device).device_type != "CPU" for device in devices)
    elif options.experimental_fetch_to_device:
        ahead = True
    else:
        on_device = options.experimental_place_dataset_on_device
        return (devices if on_device else tuple(map(host_of, devices))), 0
    # Strings, and sparse and ragged tensors, which pipelines hold in variants, are moved when they are needed.
    leaves = tf.nest.flatten(spec)
    movable = all(isinstance(leaf, tf.TensorSpec) and leaf.dtype not in (tf.string, tf.variant) for leaf in leaves)
    if not (ahead and movable):
        return devices, 0
    return devices, 1 if options is None else options.experimental_per_replica_buffer_size


def _cut_ahead(
    dataset: tf.data.Dataset, cut_batch: Callable[[Any], Shards], options: tf.distribute.InputOptions | None
) -> tf.data.Dataset:
    """Cuts batches in the background, unless somebody wants nothing to be read before it is needed."""
    spec = dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def cut_element(*components: Any) -> Shards:
        return cut_batch(as_element(spec, components))

    no_buffer = options is not None and options.experimental_per_replica_buffer_size == 0
    if no_buffer or dataset.options().experimental_optimization.inject_prefetch is False:
        # TensorFlow would run the map ahead, and hold what it gives ahead.
        at_once = tf.data.Options()
        at_once.experimental_optimization.map_parallelization = False
        at_once.experimental_optimization.inject_prefetch = False
        return dataset.map(cut_element).with_options(at_once)
    return dataset.map(cut_element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(_STEPS_AHEAD)


def _cardinality(dataset: tf.data.Dataset) -> int:
    return int(dataset.cardinality() if tf.executing_eagerly() else tf.data.UNKNOWN_CARDINALITY)
