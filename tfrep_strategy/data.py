"""Who reads what: a global batch is cut into one part for each replica, in order, nothing twice and nothing dropped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import PerReplicaSpec, auto_shard_dataset, regroup
from tfrep_strategy.keras_integration.protocol import Shards


def num_examples(batch: Any) -> tf.Tensor:
    """Counts the examples of a batch.

    Args:
        batch: A nest of dense, sparse or ragged tensors whose first dimension is the batch.

    Returns:
        int64 scalar: the first dimension of the first tensor that has one; 1 when none has.
    """
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if tf.is_tensor(leaf) and leaf.dtype != tf.variant and leaf.shape.rank != 0:
            return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)


def cut(batch: Any, num_parts: int, index: int) -> Any:
    """Takes one of `num_parts` contiguous parts of a batch.

    The first `size % num_parts` parts have one example more than the others; a part may be empty.

    Args:
        batch: A nest of dense, sparse or ragged tensors whose first dimension is the batch. Scalars are copied to all.
        num_parts: How many parts there are.
        index: Which one to take.

    Returns:
        A nest of the same structure.

    Example:
        >>> [cut(tf.range(5), 3, i).numpy().tolist() for i in range(3)]
        [[0, 1], [2, 3], [4]]
    """

    def cut_leaf(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            start, stop = _bounds(leaf.dense_shape[0], num_parts, index)
            rest = leaf.dense_shape[1:]
            part = tf.sparse.slice(
                leaf,
                tf.concat([[start], tf.zeros_like(rest)], 0),
                tf.concat([[stop - start], rest], 0),
            )
            if leaf.shape.rank is None:
                return part
            # TensorFlow forgets the dimensions that are known.
            known = [part.dense_shape[i] if size is None else size for i, size in enumerate([None, *leaf.shape[1:]])]
            return tf.SparseTensor(part.indices, part.values, tf.stack(known))
        if isinstance(leaf, tf.RaggedTensor):
            start, stop = _bounds(leaf.nrows(), num_parts, index)
            return leaf[start:stop]
        if not tf.is_tensor(leaf) or leaf.dtype == tf.variant or leaf.shape.rank == 0:
            return leaf
        rows = leaf.shape[0] if leaf.shape.rank else None
        start, stop = _bounds(tf.shape(leaf)[0] if rows is None else rows, num_parts, index)
        return leaf[start:stop]

    return tf.nest.map_structure(cut_leaf, batch)


def _bounds(rows: Any, num_parts: int, index: int) -> tuple[Any, Any]:
    base, longer = rows // num_parts, rows % num_parts

    def bound(i: int) -> Any:
        return i * base + (min(i, longer) if isinstance(rows, int) else tf.minimum(tf.cast(i, rows.dtype), longer))

    return bound(index), bound(index + 1)


def shard(batch: Any, num_replicas: int, first: int, count: int) -> Shards:
    """Cuts a global batch for the replicas `first` to `first + count - 1` of `num_replicas`."""
    return Shards(tuple(cut(batch, num_replicas, first + i) for i in range(count)), num_examples(batch))


def pack(shards: Shards) -> Any:
    """Turns one step's parts into the value that `Strategy.run` hands to the replicas."""
    return shards.parts[0] if len(shards.parts) == 1 else regroup(shards.parts)


def concatenate(parts: Sequence[Any]) -> Any:
    """Joins replica outputs along the batch: dense, sparse or ragged tensors; scalars are stacked."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(list(parts), 0)


class Agreement:
    """How the processes agree on a step when each reads a pipeline of its own.

    Args:
        rank: This process.
        size: How many processes there are.
        sum_over_processes: Sums one int64 vector over all processes, inside a `tf.function` or eagerly.
        stop_together: Whether the data ends for all as soon as it ends for one, with a warning. Otherwise those that have
            no more data take part with empty batches until the last has finished.
    """

    def __init__(
        self, rank: int, size: int, sum_over_processes: Callable[[tf.Tensor], tf.Tensor], stop_together: bool
    ) -> None:
        self.rank, self.size, self.stop_together = rank, size, stop_together
        self._sum = sum_over_processes

    def examples(self, own: tf.Tensor) -> tf.Tensor:
        """Returns how many examples all processes have for this step; 0 says that the data has ended."""
        if self.size == 1:
            return own
        counts = self._sum(tf.one_hot(self.rank, self.size, on_value=own, off_value=tf.constant(0, tf.int64)))
        total = tf.reduce_sum(counts)
        if not self.stop_together:
            return total
        ended = tf.reshape(tf.where(counts == 0), [-1])
        some_ended = tf.logical_and(tf.size(ended) > 0, total > 0)

        def stop() -> tf.Tensor:
            warning = tf.print("Warning: the data of rank", ended, "ended before that of the other ranks, so that the"
                               " epoch ends here for all.", output_stream=sys.stderr)  # fmt: skip
            with tf.control_dependencies([] if warning is None else [warning]):
                return tf.constant(0, tf.int64)

        return tf.cond(some_ended, stop, lambda: total)


class ReplicaIterator(tf.__internal__.CompositeTensor, tf.distribute.DistributedIterator):
    """Iterates over what a `ReplicaDataset` gives; can be an argument of a `tf.function`.

    Args:
        iterator: An iterator of the data set underneath: of `Shards`, or with an `agreement` of per-replica batches.
        num_local_replicas: Replicas of this process.
        agreement: How processes with pipelines of their own keep in step, or None where all read the same one.
        as_shards: Whether to hand out `Shards`, for Keras's loops, rather than what `Strategy.run` takes.
    """

    def __init__(self, iterator: Any, num_local_replicas: int, agreement: Agreement | None, as_shards: bool) -> None:
        self._iterator = iterator
        self._num_local_replicas = num_local_replicas
        self._agreement = agreement
        self._as_shards = as_shards

    def __iter__(self) -> ReplicaIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """Returns the next step's batch; raises `tf.errors.OutOfRangeError` at the end of the data."""
        if self._agreement is None:
            shards = self._iterator.get_next()
        else:
            parts, total = self._next_parts(self._agreement)
            shards = Shards(tf.cond(total > 0, lambda: parts, lambda: _at_the_end(parts)), total)
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
        shards = Shards(*self._next_parts(self._agreement))
        spec = tf.nest.map_structure(tf.type_spec_from_value, shards)
        return tf.cond(
            shards.total > 0,
            lambda: tf.experimental.Optional.from_value(shards),
            lambda: tf.experimental.Optional.empty(spec),
        )

    def _next_parts(self, agreement: Agreement) -> tuple[tuple[Any, ...], tf.Tensor]:
        parts = []
        for _ in range(self._num_local_replicas):
            optional = self._iterator.get_next_as_optional()
            empty = lambda: empty_batch(self._iterator.element_spec)  # noqa: E731
            parts.append(tf.cond(optional.has_value(), optional.get_value, empty))
        own = tf.add_n([num_examples(part) for part in parts])
        return tuple(parts), agreement.examples(own)

    @property
    def element_spec(self) -> Any:
        """The specification of what `get_next` returns."""
        return _packed_spec(self._iterator.element_spec, self._num_local_replicas, self._agreement)

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


def _part_spec(spec: Any, agreement: Agreement | None) -> Any:
    return spec.parts[0] if agreement is None else spec


def _packed_spec(spec: Any, num_local_replicas: int, agreement: Agreement | None) -> Any:
    part = _part_spec(spec, agreement)
    if num_local_replicas == 1:
        return part
    return tf.nest.map_structure(lambda leaf: PerReplicaSpec(*[leaf] * num_local_replicas), part)


class ReplicaDataset(tf.distribute.DistributedDataset):
    """A data set whose elements are steps: one batch for each replica of this process.

    Args:
        dataset: Either of `Shards` (every process reads the same pipeline and takes its parts), or, with an `agreement`,
            of per-replica batches (every process reads its own).
        num_local_replicas: Replicas of this process.
        agreement: How processes with pipelines of their own keep in step.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        num_local_replicas: int,
        agreement: Agreement | None = None,
    ) -> None:
        self.dataset = dataset
        self.agreement = agreement
        self._num_local_replicas = num_local_replicas

    def __iter__(self) -> Iterator[Any]:
        return ReplicaIterator(iter(self.dataset), self._num_local_replicas, self.agreement, as_shards=False)

    @property
    def element_spec(self) -> Any:
        """The specification of one step's batch."""
        return _packed_spec(self.dataset.element_spec, self._num_local_replicas, self.agreement)

    @property
    def part_spec(self) -> Any:
        """The specification of one replica's batch."""
        return _part_spec(self.dataset.element_spec, self.agreement)

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

    def for_keras(self) -> Any:
        """Returns an iterable whose elements are `Shards`, for Keras's training loops."""
        if self.agreement is None:
            return self.dataset
        return ShardsView(self.dataset, self._num_local_replicas, self.agreement)


class ShardsView(ReplicaDataset):
    """A `ReplicaDataset` whose iterator hands out `Shards`."""

    def __iter__(self) -> Iterator[Shards]:
        return ReplicaIterator(iter(self.dataset), self._num_local_replicas, self.agreement, as_shards=True)


def empty_batch(spec: Any) -> Any:
    """Makes a batch of no examples.

    Args:
        spec: A nest of `tf.TensorSpec`, `tf.SparseTensorSpec` or `tf.RaggedTensorSpec`.

    Returns:
        A nest of the same structure whose tensors have a first dimension of 0.
    """

    def empty_leaf(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = [0] + [d or 0 for d in leaf.shape[1:]]
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_lengths(tf.zeros([0], leaf.dtype), tf.zeros([0], leaf.row_splits_dtype))
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.zeros([0] + [d or 0 for d in leaf.shape[1:]], leaf.dtype)
        return tf.zeros([], leaf.dtype)

    return tf.nest.map_structure(empty_leaf, spec)


def in_parts(dataset: tf.data.Dataset, num_parts: int) -> tf.data.Dataset:
    """Turns a data set of global batches into one of per-replica batches: each batch becomes `num_parts` elements."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert
    def parts(*elements: Any) -> tf.data.Dataset:
        batch = elements if is_tuple else elements[0]
        pieces = [tf.data.Dataset.from_tensors(cut(batch, num_parts, i)) for i in range(num_parts)]
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = joined.concatenate(piece)
        return joined

    return dataset.flat_map(parts)


def distribute(dataset: tf.data.Dataset, first: int, count: int, agreement: Agreement) -> ReplicaDataset:
    """Spreads a data set of global batches over the replicas.

    Every process reads the same pipeline and takes its parts of each batch, which gives exactly the steps of one device,
    unless the data set's `auto_shard_policy` says otherwise: with `FILE` each process reads files of its own, with `OFF`
    each reads all that the data set has there; their batches are then cut into per-replica ones.

    Args:
        dataset: Of global batches.
        first: The first replica of this process.
        count: How many replicas this process has.
        agreement: How the processes keep in step when each reads data of its own.

    Returns:
        A `ReplicaDataset`.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    num_replicas = agreement.size * count
    if agreement.size > 1 and policy in (policies.FILE, policies.OFF):
        if policy == policies.FILE:
            dataset = auto_shard_dataset(dataset, agreement.size, agreement.rank, num_replicas)
        return ReplicaDataset(in_parts(dataset, num_replicas), count, agreement)
    is_tuple = isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert
    def cut_batch(*elements: Any) -> Shards:
        return shard(elements if is_tuple else elements[0], num_replicas, first, count)

    return ReplicaDataset(dataset.map(cut_batch), count)
