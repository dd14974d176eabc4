"""Reads the steps of distributed data: one batch for each replica of this process, on that replica's device."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.core.step import KnownRows, Shards
from tfrep_strategy.core.tf import OwnedMultiDeviceIterator, PerReplicaSpec, enumerate_registry, zip_registry
from tfrep_strategy.data import batches
from tfrep_strategy.data.agreement import Agreement, FirstBatch
from tfrep_strategy.data.batches import all_alike, any_size, empty_batch, num_examples, pack
from tfrep_strategy.data.pipeline_ends import PipelineIterator
from tfrep_strategy.errors import ConfigurationError, message

_MOST_UNROLLED = 500
"""The largest number of steps that a function may read while it is traced. A Python loop would never end."""


def host_of(device: str) -> str:
    """Returns the CPU of the machine that a device belongs to."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


class Pipeline(NamedTuple):
    """A data set that is read for some replicas of this process.

    Attributes:
        dataset: A data set of whole steps (`Shards` with a part for each replica), or of parts for the replicas in turn
            (batches, or `Shards` with one part).
        runs_on: The device on which it runs.
        ahead_to: The devices of the replicas, if elements are moved there ahead of the step.
        buffer: Number of elements that each of these devices holds.
    """

    dataset: tf.data.Dataset
    runs_on: str
    ahead_to: tuple[str, ...] = ()
    buffer: int = 1

    def start(self) -> Any:
        """Returns a TensorFlow iterator over the data set."""
        with tf.device(self.runs_on):
            if not self.ahead_to:
                return PipelineIterator(self.dataset)
            return OwnedMultiDeviceIterator(
                self.dataset,
                self.ahead_to,
                max_buffer_size=self.buffer,
                prefetch_buffer_size=self.buffer,
                source_device=self.runs_on,
            )


class Reading(NamedTuple):
    """The way in which steps are made from the elements of pipelines.

    Attributes:
        devices: The device for the part of each replica of this process.
        agreement: Keeps the processes in step; None if all have the same number of steps.
        as_shards: Whether to return `Shards`, for Keras's loops, instead of arguments for `Strategy.run`.
    """

    devices: tuple[str, ...]
    agreement: Agreement | None
    as_shards: bool = False

    def part_specs(self, specs: Sequence[Any]) -> list[Any]:
        """Returns the specification of each replica's part, given the specifications of the pipelines' elements."""
        parts: list[Any] = []
        while len(parts) < len(self.devices):
            for spec in specs:
                parts.extend(spec.parts if isinstance(spec, Shards) else [spec])
        # A replica whose data has ended gets an empty batch.
        return parts if self.agreement is None else [any_size(part) for part in parts]

    def packed_spec(self, specs: Sequence[Any]) -> Any:
        """Returns the specification of the argument for `Strategy.run`."""
        parts = self.part_specs(specs)
        return parts[0] if len(parts) == 1 else tf.nest.map_structure(lambda *leaves: PerReplicaSpec(*leaves), *parts)


class ReplicaIterator(tf.__internal__.CompositeTensor, tf.distribute.DistributedIterator):
    """An iterator over the steps of a `ReplicaDataset`. It can be an argument of a `tf.function`.

    Args:
        iterators: A TensorFlow iterator over each pipeline.
        reading: The way in which steps are made from their elements.
        first_batch: Compares the first batch between the processes, if it is read outside functions.

    Attributes:
        known_rows: What is known about the rows of its batches.
    """

    known_rows = KnownRows()

    def __init__(self, iterators: tuple[Any, ...], reading: Reading, first_batch: FirstBatch | None = None) -> None:
        self._iterators = iterators
        self._reading = reading
        self._first_batch = first_batch
        self._traced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The number of steps that were read while a function was traced, by its graph."""

    def __iter__(self) -> ReplicaIterator:
        return self

    def __next__(self) -> Any:
        if not tf.executing_eagerly():
            self._refuse_to_unroll()
        try:
            batch = self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        if self._first_batch is not None and tf.executing_eagerly():
            self._first_batch.check()
        return batch

    def _refuse_to_unroll(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        self._traced[graph] = self._traced.get(graph, 0) + 1
        if self._traced[graph] > _MOST_UNROLLED:
            raise ConfigurationError(
                message(
                    "A Python loop over distributed data never ends while a tf.function is traced.",
                    hint="use a for loop over the data, over enumerate or zip of distributed data, or over tf.range(n).",
                    steps=_MOST_UNROLLED,
                )
            )

    def get_next(self) -> Any:
        """Returns the next step's batch.

        Raises:
            tf.errors.OutOfRangeError: The data has ended.
            ConfigurationError: The caller is inside a replica.
        """
        _refuse_replicas()
        if self._reading.agreement is None:
            elements = self._read(lambda iterator: iterator.get_next())
            return self._given(self._joined([element for element, _ in elements]))
        shards, goes_on = self._next_step(self._reading.agreement)
        # If there is no step, operations that depend on its batch must not run.
        with tf.control_dependencies([tf.cond(goes_on, lambda: tf.constant(0, tf.int64), _raise_at_the_end)]):
            return self._given(shards, always_copied=True)

    def get_next_as_optional(self) -> Any:
        """Returns the next step's batch as a `tf.experimental.Optional`, which is empty at the end of the data.

        Raises:
            ConfigurationError: The caller is inside a replica.
        """
        _refuse_replicas()
        if self._reading.agreement is None:
            optionals = self._read(lambda iterator: iterator.get_next_as_optional())
            goes_on = tf.reduce_all([optional.has_value() for optional, _ in optionals])
            given: Callable[[], Any] = lambda: self._given(self._joined([_value(*each) for each in optionals]))  # noqa: E731
            spec = self._given_spec()
        else:
            step, goes_on = self._next_step(self._reading.agreement)
            batch = self._given(step)
            given = lambda: batch  # noqa: E731
            spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        return tf.cond(
            goes_on,
            lambda: tf.experimental.Optional.from_value(given()),
            lambda: tf.experimental.Optional.empty(spec),
        )

    def _next_step(self, agreement: Agreement) -> tuple[Shards, tf.Tensor]:
        """Returns this process's parts, which are empty if its data has ended, and whether there is a step."""
        optionals = self._read(lambda iterator: iterator.get_next_as_optional())
        there = [optional.has_value() for optional, _ in optionals]
        elements = [_value_or_empty(optional, device) for optional, device in optionals]
        if isinstance(elements[0], Shards):
            shards = self._joined(elements)
            return shards, agreement.all_read(tf.reduce_all(there), shards.total)
        specs = [optional.element_spec for optional, _ in optionals]
        own = [tf.where(has, num_examples(part), 0) for has, part in zip(there, elements, strict=True)]
        sizes = list(map(batches.open_sizes, specs, elements))
        summary = tf.add_n(own), all_alike(elements), tf.reduce_max(sizes, 0)
        total, goes_on, alike, others = agreement.next_step(agreement.has_step(there), *summary)
        if batches.has_open_sizes(specs):
            keeps = not self._reading.as_shards  # For Keras, the processes' batches form one batch, as long as the longest.
            sizes = [tf.where(keeps & has, own, others) for has, own in zip(there, sizes, strict=True)]
            elements = list(map(batches.with_open_sizes, specs, elements, sizes))
        return Shards(tuple(elements), total, alike), goes_on

    def _read(self, read: Callable[[Any], Any]) -> list[tuple[Any, str | None]]:
        """Reads the elements of one step. Returns each with the device that it was moved to."""
        found: list[tuple[Any, str | None]] = []
        parts_of_each = _parts_of(self._iterators[0].element_spec)
        while len(found) * parts_of_each < len(self._reading.devices):
            for iterator in self._iterators:
                if isinstance(iterator, OwnedMultiDeviceIterator):
                    found.extend(zip(read(iterator), self._moved_to(iterator), strict=True))
                else:
                    found.append((read(iterator), None))
        return found

    def _moved_to(self, iterator: Any) -> Sequence[str]:
        first = self._iterators.index(iterator)
        return self._reading.devices if len(self._iterators) == 1 else self._reading.devices[first : first + 1]

    def _joined(self, elements: Sequence[Any]) -> Shards:
        """Makes one step from its elements, each with one part or several."""
        if isinstance(elements[0], Shards):
            parts = tuple(part for element in elements for part in element.parts)
            return Shards(parts, elements[0].total, elements[0].alike)
        return Shards(tuple(elements), tf.add_n([num_examples(part) for part in elements]), all_alike(elements))

    def _given(self, shards: Shards, always_copied: bool = False) -> Any:
        """Returns a step in the form of `get_next`, with its parts on their devices."""
        if self._reading.as_shards and not always_copied:
            return shards  # Keras's step runs on the replica's device anyway.
        parts = shards.parts
        if always_copied or any(device != host_of(device) for device in self._reading.devices):
            parts = tuple(map(_copied, parts, self._reading.devices))
        given = shards._replace(parts=parts, total=tf.identity(shards.total), alike=tf.identity(shards.alike))
        return given if self._reading.as_shards else pack(given)

    def _given_spec(self) -> Any:
        specs = [iterator.element_spec for iterator in self._iterators]
        if self._reading.as_shards:
            parts = tuple(self._reading.part_specs(specs))
            return Shards(parts, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool))
        return self._reading.packed_spec(specs)

    @property
    def element_spec(self) -> Any:
        """The specification of the result of `get_next`."""
        return self._given_spec()

    @property
    def _type_spec(self) -> ReplicaIteratorSpec:
        return ReplicaIteratorSpec(tuple(iterator._type_spec for iterator in self._iterators), self._reading)


class ReplicaIteratorSpec(tf.TypeSpec):
    """Lets TensorFlow pass a `ReplicaIterator` into a function."""

    def __init__(self, iterator_specs: tuple[Any, ...], reading: Reading) -> None:
        self._iterator_specs = iterator_specs
        self._reading = reading

    value_type = property(lambda self: ReplicaIterator)

    def _serialize(self) -> tuple[Any, ...]:
        # Only used for comparison: iterators with equal elements and the same agreement share functions.
        devices, agreement, as_shards = self._reading
        return self._iterator_specs, devices, id(agreement), as_shards

    @property
    def _component_specs(self) -> Any:
        return self._iterator_specs

    def _to_components(self, value: ReplicaIterator) -> Any:
        return value._iterators

    def _from_components(self, components: Any) -> ReplicaIterator:
        return ReplicaIterator(tuple(components), self._reading)

    # TensorFlow's versions rebuild the object from `_serialize`, which does not contain the agreement itself.

    def _without_tensor_names(self) -> ReplicaIteratorSpec:
        return self._with(spec._without_tensor_names() for spec in self._iterator_specs)

    def _with_tensor_ranks_only(self) -> ReplicaIteratorSpec:
        return self._with(spec._with_tensor_ranks_only() for spec in self._iterator_specs)

    def _with(self, iterator_specs: Iterable[Any]) -> ReplicaIteratorSpec:
        return ReplicaIteratorSpec(tuple(iterator_specs), self._reading)

    def is_subtype_of(self, other: Any) -> bool:
        return self._reads_alike(other) and all(
            own.is_subtype_of(spec) for own, spec in zip(self._iterator_specs, other._iterator_specs, strict=True)
        )

    def most_specific_common_supertype(self, others: Any) -> ReplicaIteratorSpec | None:
        if not all(self._reads_alike(other) for other in others):
            return None
        common = [
            own.most_specific_common_supertype([other._iterator_specs[i] for other in others])
            for i, own in enumerate(self._iterator_specs)
        ]
        return None if None in common else self._with(common)

    def _reads_alike(self, other: Any) -> bool:
        return isinstance(other, ReplicaIteratorSpec) and self._serialize()[1:] == other._serialize()[1:]


class SpecOfSteps(tf.data.IteratorSpec):
    """A specification that is cheap to look up. TensorFlow uses it to find the trace of a function, several times a step."""

    def __eq__(self, other: object) -> bool:
        return self is other or bool(super().__eq__(other))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()


class WholeSteps:
    """Steps that TensorFlow reads without Python: each element of a data set is one step.

    Args:
        dataset: The data set.
        spec: The specification of its iterators, shared by those of all epochs.
        known_rows: See `ReplicaIterator`.
    """

    def __init__(self, dataset: tf.data.Dataset, spec: SpecOfSteps, known_rows: KnownRows) -> None:
        self._dataset, self._spec, self._known_rows = dataset, spec, known_rows

    def __iter__(self) -> PipelineIterator:
        iterator = PipelineIterator(self._dataset, self._spec)
        iterator.known_rows = self._known_rows
        return iterator


class ZippedIterator(tf.distribute.DistributedIterator):
    """Reads several iterators side by side until one of them ends, in loops of a `tf.function`."""

    def __init__(self, iterators: Sequence[Any]) -> None:
        self._iterators = iterators

    def __iter__(self) -> ZippedIterator:
        return self

    def get_next(self) -> tuple[Any, ...]:
        """Returns a tuple with the next element of each; raises `tf.errors.OutOfRangeError` if an iterator has ended."""
        return tuple(iterator.get_next() for iterator in self._iterators)

    __next__ = get_next

    def get_next_as_optional(self) -> Any:
        """Returns that tuple as a `tf.experimental.Optional`, which is empty if an iterator has ended."""
        optionals = [iterator.get_next_as_optional() for iterator in self._iterators]
        spec = tuple(optional.element_spec for optional in optionals)
        return tf.cond(
            tf.reduce_all([optional.has_value() for optional in optionals]),
            lambda: tf.experimental.Optional.from_value(tuple(optional.get_value() for optional in optionals)),
            lambda: tf.experimental.Optional.empty(spec),
        )


# Python's own `enumerate` and `zip` would read steps forever while a function is traced.


def _enumerate(source: Any, start: int = 0) -> Any:
    if tf.executing_eagerly():
        return enumerate(source, start)
    return ZippedIterator([iter(tf.data.Dataset.counter(start)), iter(source)])


def _zip(*sources: Any, strict: bool = False) -> Any:
    if tf.executing_eagerly():
        return zip(*sources, strict=strict)
    if strict:
        hint = "leave strict out, or zip outside tf.function."
        raise ConfigurationError(message("A tf.function cannot compare the lengths of distributed data.", hint, strict=strict))
    return ZippedIterator([iter(source) for source in sources])


def support_loops(kind: type) -> None:
    """Lets loops of a `tf.function` use `enumerate` and `zip` on a class of data sets or iterators."""
    enumerate_registry.register(kind, _enumerate)
    zip_registry.register(kind, _zip)


support_loops(ReplicaIterator)
support_loops(ZippedIterator)


def _refuse_replicas() -> None:
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise ConfigurationError(
            message(
                "A replica has read from a distributed iterator. Each replica would take a whole step and see one part of it.",
                hint="read outside the function that replicas run: strategy.run(fn, args=(next(iterator),)).",
            )
        )


def _parts_of(spec: Any) -> int:
    return len(spec.parts) if isinstance(spec, Shards) else 1


def _value(optional: Any, device: str | None) -> Any:
    with contextlib.nullcontext() if device is None else tf.device(device):
        return optional.get_value()


def _value_or_empty(optional: Any, device: str | None) -> Any:
    with contextlib.nullcontext() if device is None else tf.device(device):
        return tf.cond(optional.has_value(), optional.get_value, lambda: empty_batch(optional.element_spec))


def _copied(part: Any, device: str) -> Any:
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, part, expand_composites=True)


def _raise_at_the_end() -> tf.Tensor:
    """Adds an operation that raises `tf.errors.OutOfRangeError`, as TensorFlow does at the end of the data."""
    return iter(tf.data.Dataset.range(0)).get_next()
