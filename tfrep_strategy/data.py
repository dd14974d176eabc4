"""Who reads what: every process its parts of one pipeline, or a pipeline of its own, and all of them in step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import PerReplicaSpec, auto_shard_dataset
from tfrep_strategy.batches import empty_batch, in_parts, num_examples, pack, shard
from tfrep_strategy.fingerprints import FirstBatch
from tfrep_strategy.keras_integration.protocol import Shards


class Agreement:
    """How the processes agree on a step whose batches may not be there on all of them.

    Args:
        rank: This process.
        size: How many processes there are.
        sum_over_processes: Sums one int64 vector over all processes, inside a `tf.function` or eagerly.
        stop_together: Whether pipelines of their own end for all as soon as one ends, with a warning. Otherwise those that
            have no more data take part with empty batches until the last has finished.
    """

    def __init__(
        self, rank: int, size: int, sum_over_processes: Callable[[tf.Tensor], tf.Tensor], stop_together: bool
    ) -> None:
        self.rank, self.size, self.stop_together = rank, size, stop_together
        self._sum = sum_over_processes

    def examples(self, own: tf.Tensor) -> tf.Tensor:
        """Returns how many examples pipelines of their own have for this step; 0 says that the data has ended."""
        if self.size == 1:
            return own
        counts = self._gather(own)
        total = tf.reduce_sum(counts)
        return tf.where(self._all_have(counts > 0), total, 0) if self.stop_together else total

    def all_read(self, has_batch: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Returns whether the next batch of data that every process reads whole is there on all of them.

        Args:
            has_batch: bool scalar, whether this process has read one.
            own: int64 scalar, how many examples are in it.

        Returns:
            bool scalar.

        Raises:
            tf.errors.InvalidArgumentError: when it runs, where processes have read batches of different sizes.
        """
        sizes = self._gather(tf.where(has_batch, own, -1))
        one_size = tf.reduce_all((sizes == tf.reduce_max(sizes)) | (sizes < 0))
        said = "The ranks read different batches: all have to read the same data. Received: examples of each rank="
        with tf.control_dependencies([tf.debugging.Assert(one_size, [said, sizes], summarize=-1)]):
            return self._all_have(sizes >= 0)

    def _gather(self, own: tf.Tensor) -> tf.Tensor:
        return self._sum(tf.one_hot(self.rank, self.size, on_value=own, off_value=tf.constant(0, tf.int64)))

    @staticmethod
    def _all_have(has_data: tf.Tensor) -> tf.Tensor:
        """Returns whether all of a vector over the ranks is true; warns where only some of it is."""
        ended = tf.reshape(tf.where(tf.logical_not(has_data)), [-1])

        def stop() -> tf.Tensor:
            warning = tf.print("Warning: the data of rank", ended, "ended before that of the other ranks, so that the"
                               " epoch ends here for all.", output_stream=sys.stderr)  # fmt: skip
            with tf.control_dependencies([] if warning is None else [warning]):
                return tf.constant(False)

        everyone, anyone = tf.reduce_all(has_data), tf.reduce_any(has_data)
        return tf.cond(everyone == anyone, lambda: everyone, stop)


class ReplicaIterator(tf.__internal__.CompositeTensor, tf.distribute.DistributedIterator):
    """Iterates over what a `ReplicaDataset` gives; can be an argument of a `tf.function`.

    Args:
        iterator: An iterator of the data set underneath: of `Shards`, where all processes read the same, or else of
            per-replica batches, which need an `agreement`.
        num_local_replicas: Replicas of this process.
        agreement: How processes keep in step, or None where their data has one length.
        as_shards: Whether to hand out `Shards`, for Keras's loops, rather than what `Strategy.run` takes.
    """

    def __init__(self, iterator: Any, num_local_replicas: int, agreement: Agreement | None, as_shards: bool) -> None:
        self._iterator = iterator
        self._num_local_replicas = num_local_replicas
        self._agreement = agreement
        self._as_shards = as_shards
        self.first_batch: FirstBatch | None = None
        """Compared once the first batch has been read, where that happens outside functions."""

    def __iter__(self) -> ReplicaIterator:
        return self

    def __next__(self) -> Any:
        try:
            batch = self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        if self.first_batch is not None and tf.executing_eagerly():
            self.first_batch.check()
        return batch

    def get_next(self) -> Any:
        """Returns the next step's batch; raises `tf.errors.OutOfRangeError` at the end of the data."""
        if self._agreement is None:
            shards = self._iterator.get_next()
        else:
            there, total, goes_on = self._next_step(self._agreement)
            shards = Shards(tf.cond(goes_on, lambda: there, lambda: _at_the_end(there)), total)
        return shards if self._as_shards else pack(shards)

    def get_next_as_optional(self) -> Any:
        """Returns what `get_next` would as a `tf.experimental.Optional`, which is empty at the end of the data."""
        optional = self._next_shards()
        if self._as_shards:
            return optional
        return tf.cond(
            optional.has_value(),
            lambda: tf.experimental.Optional.from_value(pack(optional.get_value())),
            lambda: tf.experimental.Optional.empty(self.element_spec),
        )

    def _next_shards(self) -> Any:
        if self._agreement is None:
            return self._iterator.get_next_as_optional()
        parts, total, goes_on = self._next_step(self._agreement)
        shards = Shards(parts, total)
        spec = tf.nest.map_structure(tf.type_spec_from_value, shards)
        return tf.cond(
            goes_on,
            lambda: tf.experimental.Optional.from_value(shards),
            lambda: tf.experimental.Optional.empty(spec),
        )

    def _next_step(self, agreement: Agreement) -> tuple[tuple[Any, ...], tf.Tensor, tf.Tensor]:
        """Returns this process's parts, how many examples the step has, and whether there is such a step."""
        if isinstance(self._iterator.element_spec, Shards):
            shards, has_batch = self._next_or_empty()
            return shards.parts, shards.total, agreement.all_read(has_batch, shards.total)
        parts = tuple(self._next_or_empty()[0] for _ in range(self._num_local_replicas))
        total = agreement.examples(tf.add_n([num_examples(part) for part in parts]))
        return parts, total, total > 0

    def _next_or_empty(self) -> tuple[Any, tf.Tensor]:
        optional = self._iterator.get_next_as_optional()
        has_value = optional.has_value()
        empty = lambda: empty_batch(self._iterator.element_spec)  # noqa: E731
        return tf.cond(has_value, optional.get_value, empty), has_value

    @property
    def element_spec(self) -> Any:
        """The specification of what `get_next` returns."""
        return _packed_spec(self._iterator.element_spec, self._num_local_replicas)

    @property
    def _type_spec(self) -> ReplicaIteratorSpec:
        return ReplicaIteratorSpec(
            self._iterator._type_spec, self._num_local_replicas, self._agreement, self._as_shards
        )


class ReplicaIteratorSpec(tf.TypeSpec):
    """Lets TensorFlow pass a `ReplicaIterator` into a function."""

    def __init__(self, iterator_spec: Any, num_local_replicas: int, agreement: Agreement | None, as_shards: bool) -> None:
        self._iterator_spec = iterator_spec
        self._settings = num_local_replicas, agreement, as_shards

    value_type = property(lambda self: ReplicaIterator)

    def _serialize(self) -> tuple[Any, ...]:
        # For comparison only: functions are shared between iterators that have the same elements and that agree alike.
        num_local_replicas, agreement, as_shards = self._settings
        return self._iterator_spec, num_local_replicas, id(agreement), as_shards

    @property
    def _component_specs(self) -> Any:
        return self._iterator_spec

    def _to_components(self, value: ReplicaIterator) -> Any:
        return value._iterator

    def _from_components(self, components: Any) -> ReplicaIterator:
        return ReplicaIterator(components, *self._settings)

    # TensorFlow would derive these two from `_serialize`, which does not hold all that is needed.

    def _without_tensor_names(self) -> ReplicaIteratorSpec:
        return ReplicaIteratorSpec(self._iterator_spec._without_tensor_names(), *self._settings)

    def _with_tensor_ranks_only(self) -> ReplicaIteratorSpec:
        return ReplicaIteratorSpec(self._iterator_spec._with_tensor_ranks_only(), *self._settings)

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> ReplicaIteratorSpec | None:
        return self if all(self == other for other in others) else None


def _at_the_end(parts: Any) -> Any:
    """Raises `tf.errors.OutOfRangeError` when it runs, as TensorFlow does at the end of the data."""
    nothing = iter(tf.data.Dataset.range(0)).get_next()
    with tf.control_dependencies([nothing]):
        return tf.nest.map_structure(tf.identity, parts, expand_composites=True)


def _part_spec(spec: Any) -> Any:
    return spec.parts[0] if isinstance(spec, Shards) else spec


def _packed_spec(spec: Any, num_local_replicas: int) -> Any:
    part = _part_spec(spec)
    if num_local_replicas == 1:
        return part
    return tf.nest.map_structure(lambda leaf: PerReplicaSpec(*[leaf] * num_local_replicas), part)


class ReplicaDataset(tf.distribute.DistributedDataset):
    """A data set whose elements are steps: one batch for each replica of this process.

    Args:
        dataset: Either of `Shards` (every process reads the same pipeline and takes its parts), or of per-replica batches
            (every process reads its own).
        num_local_replicas: Replicas of this process.
        agreement: How processes keep in step that read their own, or that cannot tell how long the data is.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        num_local_replicas: int,
        agreement: Agreement | None = None,
    ) -> None:
        self.dataset = dataset
        self.agreement = agreement
        self.first_batch: FirstBatch | None = None
        """What compares the first batch of data that every process reads whole."""
        self.steps_per_batch: int | None = 1
        """How many steps a batch of the data set that was distributed makes; None where nobody knows."""
        self._num_local_replicas = num_local_replicas

    def __iter__(self) -> Iterator[Any]:
        iterator = ReplicaIterator(iter(self.dataset), self._num_local_replicas, self.agreement, as_shards=False)
        iterator.first_batch = self.first_batch
        return iterator

    @property
    def element_spec(self) -> Any:
        """The specification of one step's batch."""
        return _packed_spec(self.dataset.element_spec, self._num_local_replicas)

    @property
    def part_spec(self) -> Any:
        """The specification of one replica's batch."""
        return _part_spec(self.dataset.element_spec)

    @property
    def cardinality(self) -> int:
        """How many steps there are; negative when that is unknown or infinite, as TensorFlow has it."""
        return int(self.dataset.cardinality()) if self.agreement is None else int(tf.data.UNKNOWN_CARDINALITY)

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
        reads_whole = isinstance(self.dataset.element_spec, Shards)
        if self.agreement is None or (reads_whole and length_is_known):
            return self.dataset
        return ShardsView(self.dataset, self._num_local_replicas, self.agreement)


class ShardsView(ReplicaDataset):
    """A `ReplicaDataset` whose iterator hands out `Shards`."""

    def __iter__(self) -> Iterator[Shards]:
        return ReplicaIterator(iter(self.dataset), self._num_local_replicas, self.agreement, as_shards=True)


def distribute(dataset: tf.data.Dataset, first: int, count: int, agreement: Agreement) -> ReplicaDataset:
    """Spreads a data set of global batches over the replicas.

    Every process reads the same pipeline and takes its parts of each batch, which gives exactly the steps of one device,
    unless the data set's `auto_shard_policy` says otherwise: with `FILE` each process reads files of its own, with `OFF`
    each reads all that the data set has there; their batches are then cut into per-replica ones.

    Args:
        dataset: Of global batches.
        first: The first replica of this process.
        count: How many replicas this process has.
        agreement: How the processes keep in step when each reads data of its own, or where nobody knows how many batches
            there are (`UNKNOWN_CARDINALITY`, on all of them or on none).

    Returns:
        A `ReplicaDataset`.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    num_replicas = agreement.size * count
    if agreement.size > 1 and policy in (policies.FILE, policies.OFF):
        if policy == policies.FILE:
            dataset = auto_shard_dataset(dataset, agreement.size, agreement.rank, num_replicas)
        own = ReplicaDataset(in_parts(dataset, num_replicas), count, agreement)
        own.steps_per_batch = num_replicas if policy == policies.OFF else None
        return own
    is_tuple = isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert
    def cut_batch(*elements: Any) -> Shards:
        return shard(elements if is_tuple else elements[0], num_replicas, first, count)

    may_end_anywhere = agreement.size > 1 and dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    return ReplicaDataset(dataset.map(cut_batch), count, agreement if may_end_anywhere else None)
