"""Measures the waits of a step, by operations inside the compiled step: they cannot be seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.communicators.base import outside_xla
from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.step import KnownRows, Shards
from tfrep_strategy.core.tf import anonymous_name
from tfrep_strategy.data.batches import num_examples

_HOST = "CPU:0"


class Counts(NamedTuple):
    """The totals of a `StepClock` since it was made.

    Attributes:
        data_seconds: The time that steps have waited for their batch.
        steps: Number of steps that have got a batch.
        examples: Number of examples of these batches, including those of other processes.
        collective_seconds: The time that steps have waited for global gradients after their own were complete.
    """

    data_seconds: float
    steps: float
    examples: float
    collective_seconds: float


class StepClock:
    """Measures the waits of steps, and counts their batches.

    Its totals are not `tf.Variable`s, because a strategy in scope would make copies.

    Example:
        >>> clock = StepClock()
        >>> batch = next(clock.watching(iter(tf.data.Dataset.range(6).batch(4))))
        >>> counts = clock.read()
        >>> counts.steps, counts.examples
        (1.0, 4.0)
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(_HOST):
            self._reads, self._collectives = _zeros([3]), _zeros([1])

    def read(self) -> Counts:
        """Returns the totals. It does not wait for steps."""
        with tf.device(_HOST):
            totals = [tf.raw_ops.ReadVariableOp(resource=r, dtype=tf.float64) for r in (self._reads, self._collectives)]
        return Counts(*tf.concat(totals, 0).numpy().tolist())

    def watching(self, iterator: Any) -> WatchedIterator:
        """Returns an iterator that yields the same batches and counts them here."""
        return WatchedIterator(iterator, self)

    def count_read(self, start: tf.Tensor, batch: Any, steps: tf.Tensor, examples: tf.Tensor) -> None:
        """Adds operations that count a batch when it is available."""
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
        with tf.device(_HOST):
            seconds = _now(tensors) - start
            values = [seconds, tf.cast(steps, tf.float64), tf.cast(examples, tf.float64)]
            tf.raw_ops.AssignAddVariableOp(resource=self._reads, value=tf.stack(values))

    def count_collectives(self, collect: Callable[[Sequence[Any]], list[Any]], own: Sequence[Any]) -> list[Any]:
        """Calls `collect`, and counts the time from the last of its inputs to the last of its results."""
        with outside_xla(), tf.device(_HOST):
            start = _now(_tensors(own))
        result = collect(own)
        with outside_xla(), tf.device(_HOST):
            seconds = _now([start, *_tensors(result)]) - start
            tf.raw_ops.AssignAddVariableOp(resource=self._collectives, value=[seconds])
        return result


counting: Setting[StepClock | None] = Setting(None)
"""The clock of the step that this thread traces or runs."""


def timed_collectives(collect: Callable[[Sequence[Any]], list[Any]], own: Sequence[Any]) -> list[Any]:
    """Calls `collect(own)`, the collectives of a step's gradients, and counts their time if the step has a clock."""
    clock = counting.value
    return collect(own) if clock is None else clock.count_collectives(collect, own)


class WatchedIterator(tf.__internal__.CompositeTensor, tf.distribute.DistributedIterator):
    """An iterator whose batches a clock counts. It can be an argument of a `tf.function`.

    Args:
        iterator: An iterator of `tf.data`, or of distributed data.
        clock: The clock.
    """

    def __init__(self, iterator: Any, clock: StepClock) -> None:
        self._iterator, self._clock = iterator, clock

    @property
    def known_rows(self) -> KnownRows:
        """The rows of batches of distributed data, as far as they are known."""
        return getattr(self._iterator, "known_rows", KnownRows())

    def __iter__(self) -> WatchedIterator:
        return self

    def __next__(self) -> Any:
        if tf.executing_eagerly():  # Ranks compare their first batch there. One that is not watched does so, too.
            return self._counted(self._iterator.__next__)
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """Returns the next batch; raises `tf.errors.OutOfRangeError` at the end of the data."""
        return self._counted(self._iterator.get_next)

    def _counted(self, read: Callable[[], Any]) -> Any:
        with tf.device(_HOST):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            batch = read()
        self._clock.count_read(start, batch, tf.constant(1), _examples(batch))
        return batch

    def get_next_as_optional(self) -> Any:
        """Returns the next batch as a `tf.experimental.Optional`, which is empty at the end of the data."""
        with tf.device(_HOST):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            batch = self._iterator.get_next_as_optional()
        there = batch.has_value()
        examples = tf.cond(there, lambda: _examples(batch.get_value()), lambda: tf.constant(0, tf.int64))
        self._clock.count_read(start, there, there, examples)
        return batch

    @property
    def element_spec(self) -> Any:
        """The specification of a batch."""
        return self._iterator.element_spec

    @property
    def _type_spec(self) -> WatchedIteratorSpec:
        return WatchedIteratorSpec(self._iterator._type_spec, self._clock)


class WatchedIteratorSpec(tf.TypeSpec):
    """Lets TensorFlow pass a `WatchedIterator` into a function. Iterators with one clock and equal elements share functions."""

    def __init__(self, iterator_spec: Any, clock: StepClock) -> None:
        self._iterator_spec, self._clock = iterator_spec, clock

    value_type = property(lambda self: WatchedIterator)

    def _serialize(self) -> tuple[Any, ...]:
        return self._iterator_spec, id(self._clock)

    @property
    def _component_specs(self) -> Any:
        return self._iterator_spec

    def _to_components(self, value: WatchedIterator) -> Any:
        return value._iterator

    def _from_components(self, components: Any) -> WatchedIterator:
        return WatchedIterator(components, self._clock)

    # TensorFlow's versions rebuild the object from `_serialize`, which does not contain the clock itself.

    def _without_tensor_names(self) -> WatchedIteratorSpec:
        return WatchedIteratorSpec(self._iterator_spec._without_tensor_names(), self._clock)

    def _with_tensor_ranks_only(self) -> WatchedIteratorSpec:
        return WatchedIteratorSpec(self._iterator_spec._with_tensor_ranks_only(), self._clock)

    def is_subtype_of(self, other: Any) -> bool:
        return self._counts_alike(other) and self._iterator_spec.is_subtype_of(other._iterator_spec)

    def most_specific_common_supertype(self, others: Any) -> WatchedIteratorSpec | None:
        if not all(self._counts_alike(other) for other in others):
            return None
        common = self._iterator_spec.most_specific_common_supertype([other._iterator_spec for other in others])
        return None if common is None else WatchedIteratorSpec(common, self._clock)

    def _counts_alike(self, other: Any) -> bool:
        return isinstance(other, WatchedIteratorSpec) and self._clock is other._clock


def _zeros(shape: list[int]) -> tf.Tensor:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=anonymous_name())
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, tf.float64))
    return handle


def _now(after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time, in seconds, at which the last of some tensors is available."""
    with tf.control_dependencies(after):
        return tf.timestamp()


def _tensors(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return [tensor for tensor in tf.nest.flatten(list(gradients), expand_composites=True) if tf.is_tensor(tensor)]


def _examples(batch: Any) -> tf.Tensor:
    if isinstance(batch, Shards):
        return batch.total
    spread = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.distribute.DistributedValues)]
    return tf.add_n([num_examples(part) for part in spread[0].values]) if spread else num_examples(batch)
