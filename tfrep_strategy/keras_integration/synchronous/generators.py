"""Python generators, of which no batch is lost or taken twice by read-ahead.

Keras reads a generator through a pipeline that reads ahead, and drops what it has read when the next `fit` or `evaluate` makes
another pipeline. How much that is depends on time, and so each rank would go on with another batch.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


class Shelf:
    """Holds what pipelines have read from a generator and no step has taken.

    It lives as long as the generator, which it therefore does not hold.
    """

    _of: weakref.WeakKeyDictionary[Any, Shelf] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._untaken: deque[Any] = deque()
        self._taken = 0
        self._reader = 0
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held while the generator runs, which may wait for what the next step, or a callback, gives it."""

    @classmethod
    def of(cls, generator: Iterator[Any]) -> Shelf:
        """Returns the one shelf of a generator."""
        return cls._of.setdefault(generator, cls())

    def begin(self) -> tuple[int, int]:
        """Returns the number of a new reader, and its place: at the first batch that no step has taken. Others get no more."""
        with self._lock:
            self._reader += 1
            return self._reader, self._taken

    def is_read_by(self, reader: int) -> bool:
        """Whether no other reader has begun since."""
        return reader == self._reader

    def read(self, generator: Iterator[Any], reader: int, place: int) -> Iterator[Any]:
        """Yields copies of the batches from a place on, as long as no other reader begins."""
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
        """Hears that steps have taken so many batches."""
        with self._lock:
            for _ in range(min(count, len(self._untaken))):
                self._untaken.popleft()
                self._taken += 1


class GeneratorReading:
    """How the epochs of one `fit`, `evaluate` or `predict` read a generator.

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
        """Returns a generator for Keras's adapter, which takes the first batches from it to see what they are."""
        return self._shelf.read(self._generator, *self._reader)

    def read_by(self, adapter: Any) -> None:
        """Has the pipelines of an adapter read as this object says."""
        self._first = adapter._first_batches
        adapter.generator = lambda: itertools.chain(self._repeated, self._shelf.read(self._generator, *self._reader))

    def begin(self, goes_on: bool = False) -> None:
        """Hears that a pipeline is made. All but the first begin with the first batches, as Keras's do.

        They go on with those that nobody has taken. One that `goes_on` in place of another has only these.
        """
        self._reader = self._shelf.begin()
        self._repeated = self._first if self._has_begun and not goes_on else []
        self._num_repeated = len(self._repeated)
        self._has_begun = True

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody else has begun to read the generator, such as the validation of the same `fit`."""
        return not self._shelf.is_read_by(self._reader[0])

    def note_steps(self, count: int) -> None:
        """Hears how many batches steps have taken from the last pipeline."""
        repeated = min(count, self._num_repeated)
        self._num_repeated -= repeated
        self._shelf.take(count - repeated)
