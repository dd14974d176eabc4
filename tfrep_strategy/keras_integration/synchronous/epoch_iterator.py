"""The iterator of Keras's loops: the steps of an epoch, each with the `Shards` of all replicas of this process.

If code that reads data has drawn random numbers, all of an epoch must be read for the next one to be the same.

Keras reads a Python generator through a pipeline that reads ahead. It drops batches read ahead when the next `fit` or `evaluate`
makes another pipeline. Their number depends on time, so each rank would continue with another batch. Here no batch is
lost or used twice.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.core.step import KerasStrategy, KnownRows
from tfrep_strategy.core.tf import dataset_kinds, is_traced, leaves_traces, parts_of_dataset
from tfrep_strategy.keras_integration.finding import loops_data_of
from tfrep_strategy.keras_integration.internals import TFEpochIterator, array_data_adapter
from tfrep_strategy.keras_integration.profiled_fit import Pace, ProfiledFit


@dataclass(frozen=True)
class RandomStates:
    """The states of random generators.

    Attributes:
        of_python: The state of the module `random`.
        others: The states of NumPy, and of generators that the data holds.
    """

    of_python: Any
    others: bytes

    def after_shuffling(self, length: int) -> RandomStates:
        """Returns the states after `random.shuffle` of a list.

        Args:
            length: The length of the list.
        """
        generator = random.Random()
        generator.setstate(self.of_python)
        generator.shuffle(list(range(length)))
        return replace(self, of_python=generator.getstate())


def random_states(data: Any) -> RandomStates:
    """Returns the states of the random generators that the code of some data may draw from.

    Args:
        data: The data of `fit`. Its attributes may be generators.

    Example:
        >>> before = random_states(None)
        >>> random_states(None) == before
        True
    """
    own = [_state(value) for value in getattr(data, "__dict__", {}).values()]
    return RandomStates(random.getstate(), pickle.dumps([np.random.get_state(), own]))


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, np.random.RandomState) else None


class Shelf:
    """Holds batches that pipelines have read from a generator and no step has taken.

    It lives as long as the generator, and so holds no reference to it.
    """

    _of: weakref.WeakKeyDictionary[Any, Shelf] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._untaken: deque[Any] = deque()
        self._taken = 0
        self._reader = 0
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held while the generator runs. It may wait for something that the next step, or a callback, provides."""

    @classmethod
    def of(cls, generator: Iterator[Any]) -> Shelf:
        """Returns the shelf of a generator."""
        return cls._of.setdefault(generator, cls())

    def begin(self) -> tuple[int, int]:
        """Returns the number of a new reader, and its place: the first batch that no step has taken. Other readers end."""
        with self._lock:
            self._reader += 1
            return self._reader, self._taken

    def is_read_by(self, reader: int) -> bool:
        """Returns whether no other reader has begun since."""
        return reader == self._reader

    def read(self, generator: Iterator[Any], reader: int, place: int) -> Iterator[Any]:
        """Yields copies of the batches from a place on, until another reader begins."""
        while (batch := self._batch(generator, reader, place)) is not None:
            # TensorFlow may write into memory that it shares with an aligned array.
            yield keras.tree.map_structure(lambda v: v.copy() if isinstance(v, np.ndarray) else v, batch[0])
            place += 1

    def _batch(self, generator: Iterator[Any], reader: int, place: int) -> tuple[Any] | None:
        while True:
            with self._lock:
                if reader != self._reader:
                    return None
                if place - self._taken < len(self._untaken):
                    return (self._untaken[place - self._taken],)
            with self._asking:
                with self._lock:
                    if reader != self._reader or place - self._taken < len(self._untaken):
                        continue
                try:
                    batch = next(generator)
                except StopIteration:
                    return None
                with self._lock:
                    self._untaken.append(batch)

    def take(self, count: int) -> None:
        """Records that steps have taken this number of batches."""
        with self._lock:
            for _ in range(min(count, len(self._untaken))):
                self._untaken.popleft()
                self._taken += 1


class GeneratorReading:
    """The reading of a generator in the epochs of one `fit`, `evaluate` or `predict`.

    Args:
        generator: Yields batches.
    """

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator, self._shelf = generator, Shelf.of(generator)
        self._reader = self._shelf.begin()
        self._first: list[Any] = []
        self._repeated: list[Any] = []
        self._num_repeated = 0
        self._has_begun = False

    def for_adapter(self) -> Iterator[Any]:
        """Returns a generator for Keras's adapter, which takes its first batches to inspect them."""
        return self._shelf.read(self._generator, *self._reader)

    def read_by(self, adapter: Any) -> None:
        """Makes the pipelines of an adapter read through this object."""
        self._first = adapter._first_batches
        adapter.generator = lambda: itertools.chain(self._repeated, self._shelf.read(self._generator, *self._reader))

    def begin(self, goes_on: bool = False) -> None:
        """Records a new pipeline. As in Keras, all pipelines but the first begin with the first batches.

        Then come the batches that no step has taken. A pipeline that `goes_on` instead of another one has only these.
        """
        self._reader = self._shelf.begin()
        self._repeated = self._first if self._has_begun and not goes_on else []
        self._num_repeated = len(self._repeated)
        self._has_begun = True

    @property
    def is_interrupted(self) -> bool:
        """Whether another reader of the generator has begun, such as the validation of the same `fit`."""
        return not self._shelf.is_read_by(self._reader[0])

    def note_steps(self, count: int) -> None:
        """Records how many batches steps have taken from the last pipeline."""
        repeated = min(count, self._num_repeated)
        self._num_repeated -= repeated
        self._shelf.take(count - repeated)


_ARRAYS = ("x", "y", "sample_weight")
_SETTINGS = ("class_weight", "batch_size", "steps_per_epoch", "shuffle", "steps_per_execution")


class StepsOfReplicas(TFEpochIterator):
    """Yields whole steps, so that a replica knows its share of the global batch, and equally many on all processes.

    Args:
        driver: The driver of the model.
        epochs: The largest number of epochs that will be read; None if it is unknown.
        **kwargs: The arguments of Keras's loops: the data, and settings.
    """

    _distributed_dataset: Any
    _epoch_iterator: Any
    _num_batches: int | None
    _current_iterator: Any

    def __init__(self, driver: Any, epochs: int | None, **kwargs: Any) -> None:
        strategy = driver.strategy
        arrays = {name: kwargs.get(name) for name in _ARRAYS}
        settings = {name: kwargs.get(name) for name in _SETTINGS}
        beside, strategy.extended.given_beside = strategy.extended.given_beside, {}
        strategy.extended.begin_call(settings, arrays | beside)
        x = kwargs.get("x")
        self._generator = GeneratorReading(x) if isinstance(x, types.GeneratorType) else None
        if self._generator is not None:
            kwargs["x"] = self._generator.for_adapter()
        strategy.extended.notes_first_batch = not array_data_adapter.can_convert_arrays(tuple(arrays.values()))
        try:
            most = _most_steps(epochs, **settings) if isinstance(x, tf.data.Dataset) else None
            with loops_data_of.to(driver), strategy.extended.reads_at_most.to(most):
                super().__init__(distribute_strategy=strategy, **kwargs)
        finally:
            strategy.extended.notes_first_batch = True
        if self._generator is not None:
            self._generator.read_by(self.data_adapter)
        self._of_replicas = self._distributed_dataset
        self.part_spec = self._of_replicas.part_spec
        # Pipelines may differ between the processes, but all processes run a step in the same way.
        self.known_rows = KnownRows.common(strategy.extended.all_gather_object(self._of_replicas.known_rows))
        self._common_batches = _batches_of_all(strategy, self._distributed_dataset, self._num_batches, self.data_adapter)
        self._num_batches = self._common_batches
        self._may_end_before = self._common_batches is not None and self._of_replicas.steps_per_batch != 1
        self._data = x
        self._reads_one_more = most is not None and _is_shuffled_and_endless(x)
        self.is_of_fit = False
        """Whether these are the steps of a `fit`, which may resume from a backup, and not of validation or of a callback."""
        self.before_step: Callable[[int], None] | None = None
        """Called before each step, when all callbacks have seen the previous one."""
        self.profile: ProfiledFit | None = None
        """Marks the steps in traces, from the begin of each execution until all callbacks have seen it."""
        self.pace: Pace | None = None
        """Measures how fast they are, in a run that says so at its end."""
        self._mark, self._is_marked = contextlib.ExitStack(), False
        self._noted_steps: Generator[Any, None, None] | None = None

    def reset(self) -> None:
        """Resets the state of an epoch, but keeps the limit from other processes' shorter data."""
        super().reset()
        self._num_batches = self._common_batches

    def _interrupted_warning(self) -> None:
        """Records the number of steps if the last batch of each process makes fewer steps than other batches."""
        if self._may_end_before and self.steps_per_epoch is None:
            self._common_batches = self._num_batches = self._steps_seen - self.steps_per_execution
        else:
            super()._interrupted_warning()

    def __iter__(self) -> StepsOfReplicas:
        """Begins an epoch. It skips steps that an interrupted run has done, so that the order of the data continues."""
        strategy = self._distribute_strategy
        epochs, batches = 0, 0
        if self.is_of_fit:
            (epochs, batches), strategy.extended.resumes_at = strategy.extended.resumes_at, (0, 0)
        strategy.extended.first_batch = self._of_replicas.first_batch
        self._distributed_dataset = self._of_replicas.for_keras(self._common_batches is not None, self.known_rows)
        self.pass_over(epochs)
        super().__iter__()
        if batches:
            self._epoch_iterator = itertools.dropwhile(lambda step: self._passes_over(step, batches), self._epoch_iterator)
        return self

    def __next__(self) -> Any:
        # This runs in every step, so it calls nothing that Keras does not call.
        if self._is_marked:
            self._is_marked = False
            self._mark.close()
        if self.pace is not None:
            self.pace.step()
        step = next(self._epoch_iterator)
        if self.before_step is not None:
            self.before_step(step[0])
        if self.profile is not None:
            if self.profile.wanted is None and not is_traced():
                self.profile.count(step[1] - step[0] + 1)
            else:
                self._is_marked = True
                self._mark.enter_context(self.profile.step(step[1] - step[0] + 1))
        return step

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the mark of a step if a callback has made it the last one, or it has failed."""
        try:
            with super().catch_stop_iteration(), self._mark:
                yield
        finally:
            if self.pace is not None:
                self.pace.pause()
            if self._noted_steps is not None:
                self._noted_steps.close()  # Records the last step now, also if a callback has ended the epoch.

    def read_one_more(self) -> None:
        """Reads a step that is not used, if an iterator continues from epoch to epoch.

        On one device TensorFlow reads this step ahead. If a `shuffle` started again for it, the data has another order when it is
        read again: on one device, and so on every process.
        """
        if self._reads_one_more and self._current_iterator is not None:
            with contextlib.suppress(StopIteration):
                next(self._current_iterator)

    def _passes_over(self, step: tuple[int, int, Iterator[Any]], batches: int) -> bool:
        first, last, iterator = step
        if last >= batches:
            return False
        for _ in range(first, last + 1):
            next(iterator)
        return True

    def _enumerate_iterator(self) -> Iterator[Any]:
        steps: Iterator[Any] = super()._enumerate_iterator()
        if self._generator is None:
            return steps
        self._noted_steps = self._noted(steps, self._generator)
        return self._noted_steps

    def _get_iterator(self) -> Any:
        if self._generator is not None:
            self._generator.begin()
        data = super()._get_iterator()
        return data if self.pace is None else self.pace.watching(data)

    def _noted(self, steps: Iterator[Any], generator: GeneratorReading) -> Generator[Any, None, None]:
        other = None
        for first, last, iterator in steps:
            if generator.is_interrupted:
                generator.begin(goes_on=True)
                data = super()._get_iterator()
                other = iter(data if self.pace is None else self.pace.watching(data))
                if self._current_iterator is not None:
                    self._current_iterator = other
            try:
                yield first, last, iterator if other is None else other
            finally:
                generator.note_steps(last - first + 1)

    def pass_over(self, epochs: int, left_early: bool = False) -> None:
        """Advances the order of the data as if so many epochs had been read; the last one perhaps not to its end."""
        for epoch in range(epochs):
            self._pass_over_epoch(left_early and epoch == epochs - 1)

    def pass_over_validations(self, count: int) -> None:
        """Advances the order of validation data as if there had been so many validations. Each starts from the beginning."""
        for _ in range(count):
            self.reset()
            self._pass_over_epoch()

    def _pass_over_epoch(self, left_early: bool = False) -> None:
        # If each epoch starts its own iterator, reading one batch of it is enough to draw the next epoch's order.
        starts_again = self.steps_per_epoch is None and self.num_batches is not None and not self._leaves_traces()
        with contextlib.suppress(StopIteration):
            for first, last, iterator in self._enumerate_iterator():
                if first == 0 or not starts_again:
                    before = random_states(self._data)
                    for _ in range(first, last + 1):
                        next(iterator)
                    # Code that draws for one batch draws for every batch.
                    starts_again = starts_again and random_states(self._data) in (before, self._with_order_drawn(before))
                if left_early and starts_again:
                    break  # At the end of a whole epoch Keras makes another iterator.

    def _leaves_traces(self) -> bool:
        """Returns whether an epoch depends on how much of the previous one was read."""
        if isinstance(self._data, tf.data.Dataset):
            return leaves_traces(self._data)
        return getattr(self.data_adapter, "enqueuer", None) is not None  # Keras's workers keep batches that were not taken.

    def _with_order_drawn(self, states: RandomStates) -> RandomStates:
        """Returns the states of generators after Keras has drawn the order of an epoch of a `PyDataset`."""
        return states.after_shuffling(self.data_adapter.num_batches) if isinstance(self._data, keras.utils.PyDataset) else states


def _is_shuffled_and_endless(data: tf.data.Dataset) -> bool:
    """Returns whether data never ends and reading it may draw another order. Other data may block its reader."""
    is_shuffled = any(isinstance(part, dataset_kinds.Shuffle) for part in parts_of_dataset(data))
    return is_shuffled and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY


def _most_steps(epochs: int | None, steps_per_epoch: int | None, steps_per_execution: int | None, **others: Any) -> int | None:
    """Returns the number of steps that will be read of an iterator that continues over epochs, plus one; see `read_one_more`.

    The last execution of an epoch is whole.
    """
    if epochs is None or steps_per_epoch is None or steps_per_epoch < 1:
        return None
    at_once = steps_per_execution or 1
    return epochs * -(-steps_per_epoch // at_once) * at_once + 1


def _batches_of_all(strategy: KerasStrategy, distributed: Any, num_batches: int | None, adapter: Any) -> int | None:
    """Returns the largest number of steps of an epoch, on every process; None if only the data can tell."""
    if distributed.cardinality >= 0:  # The data was cut to the shortest length when it was distributed.
        return None if num_batches is None else min(num_batches, distributed.cardinality)
    if distributed.steps_per_batch != 1:  # Each process reads its own data, and the epoch ends with the last process.
        most = distributed.steps_per_batch
        of_all = strategy.extended.all_gather_object(most and num_batches and _steps_of(adapter, num_batches, most))
        return None if None in of_all else max(of_all)
    shortest = strategy.extended.shortest_epoch(int(tf.data.UNKNOWN_CARDINALITY) if num_batches is None else num_batches)
    return shortest if shortest >= 0 else None


def _steps_of(adapter: Any, num_batches: int, most: int) -> int:
    """Returns the number of steps of some batches. A batch makes a step for each row, at most one for each replica."""
    if not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return num_batches * most
    last = adapter.partial_batch_size or adapter.batch_size
    return (num_batches - 1) * min(most, adapter.batch_size) + min(most, last)
