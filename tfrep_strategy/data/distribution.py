"""Distribution of data sets: each process reads its part of one pipeline, or its own pipelines."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.core.limits import verification
from tfrep_strategy.core.step import KnownRows, Shards
from tfrep_strategy.core.tf import auto_shard_dataset
from tfrep_strategy.data.agreement import Agreement, FirstBatch
from tfrep_strategy.data.batches import cut, in_turn, known_examples, num_examples
from tfrep_strategy.data.distributed_iterator import (
    Pipeline,
    Reading,
    ReplicaIterator,
    SpecOfSteps,
    WholeSteps,
    host_of,
    support_loops,
)
from tfrep_strategy.data.own_part import OwnReplicas, cut_low, cutting, maps_examples
from tfrep_strategy.data.pipeline_functions import alike_on_all_processes, rows_are_alike
from tfrep_strategy.errors import ConfigurationError, message, warn

_PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA
_POLICIES = tf.data.experimental.AutoShardPolicy
_OF_EACH = (_POLICIES.FILE, _POLICIES.OFF)
"""The policies under which each process reads its own pipeline."""
_STEPS_AHEAD = 2
"""The number of steps that are cut ahead."""
_WORTH_MOVING_BYTES = 4 << 20
"""The batch size from which batches are moved to GPUs ahead. TensorFlow's iterator for that takes 0.1 s to start, in each epoch,
and some 0.3 ms a batch; a copy on demand moves about 6 GB/s."""
_EXPECTED_ROWS = 64


class ReplicaDataset(tf.distribute.DistributedDataset):
    """A data set whose elements are steps: one batch for each replica of this process.

    Args:
        pipelines: One pipeline for all replicas of this process, or one for each replica.
        reading: The way in which steps are made from the elements of the pipelines.
        cardinality: The number of steps, or one of TensorFlow's negative values for unknown and infinite.
    """

    def __init__(self, pipelines: Sequence[Pipeline], reading: Reading, cardinality: int) -> None:
        self._pipelines = tuple(pipelines)
        self._reading = reading
        self.cardinality = cardinality
        self.without_note: Callable[[], tf.data.Dataset] | None = None
        """Makes the data set of the first pipeline again, without recording the first batch."""
        self.first_batch: FirstBatch | None = None
        """Compares the first batch between the processes, if each reads the whole data."""
        self.is_of_one_replica = False
        """Whether there is only one replica, which gets the global batches."""
        self.steps_per_batch: int | None = 1
        """The largest number of steps that one batch of the original data set makes; None if it is unknown."""
        self._spec_of_steps: SpecOfSteps | None = None
        self.batches: Sequence[tf.data.Dataset] = ()
        """The data sets of batches that it was made of, if they may describe its steps."""
        self.is_of_each = False
        """Whether pipelines are read separately, so that sizes other than the numbers of rows may differ between them."""
        self._known_rows = KnownRows()

    def __iter__(self) -> Iterator[Any]:
        self.note_no_more()
        iterator = ReplicaIterator(tuple(pipeline.start() for pipeline in self._pipelines), self._reading, self.first_batch)
        iterator.known_rows = self._known_rows
        return iterator

    def note_no_more(self) -> None:
        """Removes the operation that records the first batch once it has been compared, so that iterators start faster."""
        is_over = self.first_batch is not None and self.first_batch.is_compared
        if is_over and self.without_note is not None and tf.executing_eagerly():
            make, self.without_note = self.without_note, None
            self._pipelines = (self._pipelines[0]._replace(dataset=make()),)

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
        """Folds `reduce_func(state, batch)` over the steps. AutoGraph turns a `for` loop over the data into such a fold."""
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

        # Iterations must not run in parallel, since each reads the next batch.
        start = iterator.get_next_as_optional(), initial_state
        return tf.while_loop(lambda optional, state: optional.has_value(), step, start, parallel_iterations=1)[1]

    def for_keras(self, length_is_known: bool, known_rows: KnownRows) -> Any:
        """Returns an iterable of `Shards`, for Keras's training loops; or of batches, if there is only one replica.

        Args:
            length_is_known: Whether Keras's loops run the same number of steps on every process.
            known_rows: What all processes know about the rows of batches.
        """
        self.note_no_more()
        first = self._pipelines[0]
        reads_whole = self.is_of_one_replica or isinstance(first.dataset.element_spec, Shards)
        agreement = None if reads_whole and length_is_known else self._reading.agreement
        if reads_whole and agreement is None and not first.ahead_to:
            spec = SpecOfSteps(first.dataset.element_spec)
            if spec != self._spec_of_steps:
                self._spec_of_steps = spec
            return WholeSteps(first.dataset, self._spec_of_steps, known_rows)
        reading = Reading(self._reading.devices, agreement, as_shards=True)
        steps = ReplicaDataset(self._pipelines, reading, self.cardinality)
        steps._known_rows = known_rows
        return steps

    @functools.cached_property
    def known_rows(self) -> KnownRows:
        """The rows of batches, as far as this process knows them."""
        is_known, is_even = bool(self.batches) and all(map(rows_are_alike, self.batches)), not self.is_of_each
        if not is_known:
            return KnownRows(are_even=is_even, are_apart=bool(self.batches) and self.is_of_each)
        return KnownRows(True, known_examples(self.batches[0].element_spec) if is_even else None, is_even)


support_loops(ReplicaDataset)


class LocalReplicas(NamedTuple):
    """The replicas of this process.

    Attributes:
        first: The id of the first replica.
        devices: The device of each replica.
        agreement: Keeps the processes in step if each reads its own data.
    """

    first: int
    devices: tuple[str, ...]
    agreement: Agreement

    @property
    def total(self) -> int:
        """Number of replicas of all processes."""
        return self.agreement.size * len(self.devices)


def distribute(
    dataset: tf.data.Dataset,
    replicas: LocalReplicas,
    options: tf.distribute.InputOptions | None = None,
    first_batch: FirstBatch | None = None,
    most: int | None = None,
) -> ReplicaDataset:
    """Spreads a data set of global batches over the replicas.

    By default every process reads the same pipeline and takes its part of each batch. The steps are then exactly those of
    one device. Each process computes only what its part needs, as far as that is known (`own_part.py`). With the
    `auto_shard_policy` `FILE` each process reads its own files; with `OFF` each process reads all data of its data set. Their
    batches are then cut into per-replica batches.

    Args:
        dataset: A data set of global batches.
        replicas: The replicas of this process. Their agreement is used if each process reads its own data, or if the number
            of batches is unknown (`UNKNOWN_CARDINALITY`, on all processes or on none).
        options: The devices to move batches to, and how far ahead.
        first_batch: Records the first batch of a pipeline that all processes read.
        most: The largest number of steps that will be read, if known. No more are read ahead, because a `shuffle` that starts
            again changes the order for all later readers.

    Returns:
        A `ReplicaDataset`.

    Raises:
        ConfigurationError: The options do not apply to one data set.
    """
    _check(options)
    given = dataset
    if options is not None and options.experimental_replication_mode == _PER_REPLICA:
        raise ConfigurationError(
            message(
                "The replicas cannot each read one data set from the start.",
                hint="use distribute_datasets_from_function, or InputReplicationMode.PER_WORKER.",
                experimental_replication_mode=options.experimental_replication_mode,
            )
        )
    agreement, count, cardinality = replicas.agreement, len(replicas.devices), _cardinality(dataset)
    spec = dataset.element_spec
    devices, buffer = _destinations(replicas, options, spec)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if agreement.size > 1 and policy in _OF_EACH:
        if policy == _POLICIES.FILE:
            dataset = auto_shard_dataset(dataset, agreement.size, agreement.rank, replicas.total)
        dataset = in_turn(dataset, lambda batch: [cut(batch, replicas.total, i) for i in range(replicas.total)])
        # A batch may have fewer rows than there are replicas. A step without rows on any replica would train on nothing.
        dataset = dataset.filter(tf.autograph.experimental.do_not_convert(lambda *part: num_examples(part) > 0))
        pipeline = Pipeline(dataset, host_of(devices[0]), devices if buffer else (), buffer)
        own = ReplicaDataset([pipeline], Reading(devices, agreement), int(tf.data.UNKNOWN_CARDINALITY))
        own.batches, own.is_of_each = [given], True
        own.steps_per_batch = replicas.total if policy == _POLICIES.OFF else None
        return own
    place = OwnReplicas(replicas.total, replicas.first, count)
    reads_ahead = _reads_ahead(dataset, options)
    shards = _cut(dataset, place, agreement, reads_ahead, first_batch, most)
    must_repeat = agreement.size > 1 or verification() is not None
    alike = alike_on_all_processes if must_repeat else lambda each: each
    shards = alike(shards)
    if buffer and count > 1:
        # Each part is a separate element; TensorFlow's iterator sends the elements to the devices in turn.
        shards = in_turn(shards, lambda step: [step._replace(parts=(part,)) for part in step.parts])
    may_end_anywhere = agreement.size > 1 and cardinality == tf.data.UNKNOWN_CARDINALITY
    pipeline = Pipeline(shards, host_of(devices[0]), devices if buffer else (), buffer)
    distributed = ReplicaDataset([pipeline], Reading(devices, agreement if may_end_anywhere else None), cardinality)
    distributed.first_batch, distributed.batches = first_batch, [given]
    if first_batch is not None and reads_ahead and tf.executing_eagerly():
        distributed.without_note = lambda: alike(_ahead(cut_low(dataset, place, None, most).dataset, most))
    distributed.is_of_one_replica = replicas.total == 1
    return distributed


def distribute_from_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    replicas: LocalReplicas,
    options: tf.distribute.InputOptions | None = None,
) -> ReplicaDataset:
    """Lets each process, or each replica, read its own pipeline.

    Args:
        dataset_fn: Called once for each pipeline, with a `tf.distribute.InputContext`. It returns a data set of per-replica
            batches.
        replicas: The replicas of this process.
        options: With `PER_REPLICA` each replica has a pipeline, otherwise each process.

    Returns:
        A `ReplicaDataset`. It ends when the last pipeline ends. Until then replicas without data get empty batches.

    Raises:
        ConfigurationError: The options contradict each other, or the function does not return a data set.
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
                message(
                    "The function must return a tf.data.Dataset.",
                    hint="wrap generators in tf.data.Dataset.from_generator, arrays in from_tensor_slices.",
                    returned=type(dataset).__name__,
                )
            )
        devices, buffer = _destinations(replicas, options, dataset.element_spec)
        own = devices[len(pipelines) : len(pipelines) + 1] if per_replica else devices
        pipelines.append(Pipeline(dataset, device, own if buffer else (), buffer))
    cardinalities = {_cardinality(pipeline.dataset) for pipeline in pipelines}
    # If no data ends, no replica will ever lack a batch.
    never_ends = agreement.size == 1 and cardinalities == {tf.data.INFINITE_CARDINALITY}
    cardinality = tf.data.INFINITE_CARDINALITY if never_ends else tf.data.UNKNOWN_CARDINALITY
    distributed = ReplicaDataset(pipelines, Reading(devices, None if never_ends else agreement), int(cardinality))
    distributed.batches, distributed.is_of_each = [pipeline.dataset for pipeline in pipelines], True
    return distributed


def _check(options: tf.distribute.InputOptions | None) -> None:
    """Refuses options that TensorFlow's strategies refuse too, and options without effect."""
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
                "A data set on the device gives batches that are on the device already.",
                hint="set experimental_fetch_to_device=False.",
                experimental_place_dataset_on_device=True,
                experimental_fetch_to_device=True,
            )
        )
    if options.experimental_per_replica_buffer_size < 0:
        raise ConfigurationError(
            message(
                "A buffer size must be 0 or more.",
                hint="leave it out, or use 1 or 2.",
                experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size,
            )
        )


def _destinations(replicas: LocalReplicas, options: tf.distribute.InputOptions | None, spec: Any) -> tuple[tuple[str, ...], int]:
    """Returns the device of each replica's batches, and the number of batches that are moved there ahead of the step."""
    devices = replicas.devices
    if options is None:
        on_gpus = any(tf.DeviceSpec.from_string(device).device_type != "CPU" for device in devices)
        ahead = on_gpus and _expected_bytes(spec) >= _WORTH_MOVING_BYTES
    elif options.experimental_fetch_to_device:
        ahead = True
    else:
        on_device = options.experimental_place_dataset_on_device
        return (devices if on_device else tuple(map(host_of, devices))), 0
    # Strings cannot be moved ahead. Neither can sparse and ragged tensors, which pipelines hold as variants.
    leaves = tf.nest.flatten(spec)
    movable = all(isinstance(leaf, tf.TensorSpec) and leaf.dtype not in (tf.string, tf.variant) for leaf in leaves)
    if not (ahead and movable):
        return devices, 0
    return devices, 1 if options is None else options.experimental_per_replica_buffer_size


def _expected_bytes(spec: Any) -> int:
    """Returns the number of bytes of a batch, with `_EXPECTED_ROWS` for an open batch size."""
    leaves = [leaf for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank]
    sizes = ([leaf.shape[0] or _EXPECTED_ROWS, *(size or 1 for size in leaf.shape[1:])] for leaf in leaves)
    return sum(math.prod(size) * leaf.dtype.size for size, leaf in zip(sizes, leaves, strict=True))


def _reads_ahead(dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None) -> bool:
    no_buffer = options is not None and options.experimental_per_replica_buffer_size == 0
    return not no_buffer and dataset.options().experimental_optimization.inject_prefetch is not False


def _cut(
    dataset: tf.data.Dataset,
    place: OwnReplicas,
    agreement: Agreement,
    reads_ahead: bool,
    first_batch: FirstBatch | None,
    most: int | None,
) -> tf.data.Dataset:
    """Cuts batches, in the background if reading ahead is allowed."""
    if place.total == 1:  # Cutting would cost as much as a step of a tiny net.
        return dataset
    if agreement.size > 1 and maps_examples(dataset):
        _warn_of_waste(_why_at_the_end(reads_ahead), agreement)
    if not reads_ahead:
        # By default TensorFlow would run the map ahead and keep its results.
        at_once = tf.data.Options()
        at_once.experimental_optimization.map_parallelization = False
        at_once.experimental_optimization.inject_prefetch = False
        noted = dataset if first_batch is None else first_batch.noted(dataset)
        return noted.map(cutting(dataset, place)).with_options(at_once)
    if agreement.size == 1 or not tf.executing_eagerly():
        read = dataset if most is None else dataset.take(most)
        return _ahead(read.map(cutting(dataset, place), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True), None)
    low = cut_low(dataset, place, first_batch, most)
    _warn_of_waste(low.reason, agreement)
    return _ahead(low.dataset, most)


def _ahead(shards: tf.data.Dataset, most: int | None) -> tf.data.Dataset:
    return (shards if most is None else shards.take(most)).prefetch(_STEPS_AHEAD)


def _why_at_the_end(reads_ahead: bool) -> str:
    """Returns the reason why batches are cut at the end of their pipeline; empty if they are not."""
    if not reads_ahead:
        return "nothing may be read ahead; allow `inject_prefetch`, and a buffer in `tf.distribute.InputOptions`"
    return "" if tf.executing_eagerly() else "it is distributed in a function; distribute it outside"


def _warn_of_waste(reason: str, agreement: Agreement) -> None:
    if reason and agreement.rank == 0:
        warn(f"Each process also computes the examples of the other processes: {reason}.")


def explain(dataset: tf.data.Dataset, replicas: LocalReplicas) -> str:
    """Lists the operations of a data set that a process computes only for its own examples, and why not the others."""
    if replicas.agreement.size == 1:
        return "One process reads the data set and computes all of it."
    if dataset.options().experimental_distribute.auto_shard_policy in _OF_EACH:
        return "Each process reads its own pipeline."
    if why := _why_at_the_end(_reads_ahead(dataset, None)):
        return f"Each of {replicas.agreement.size} processes computes all of it: {why}."
    low = cut_low(dataset, OwnReplicas(replicas.total, replicas.first, len(replicas.devices)), None)
    own = ", ".join(low.above) or "nothing"
    said = f"Each of {replicas.agreement.size} processes computes for its own examples only: {own}."
    return f"{said} It computes the rest for all: {low.reason}." if low.reason else said


def _cardinality(dataset: tf.data.Dataset) -> int:
    return int(dataset.cardinality() if tf.executing_eagerly() else tf.data.UNKNOWN_CARDINALITY)
