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
        self._readers = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, generator: Iterator[Any]) -> Shelf:
        """Returns the one shelf of a generator."""
        return cls._of.setdefault(generator, cls())

    def read(self, generator: Iterator[Any]) -> Iterator[Any]:
        """Yields copies of all batches that no step has taken; whoever has read before gets no more."""
        with self._lock:
            self._readers += 1
            reader = self._readers
            place = self._taken
        while (batch := self._batch(generator, reader, place)) is not None:
            # TensorFlow may write into memory that it shares with an aligned array.
            yield keras.tree.map_structure(lambda v: v.copy() if isinstance(v, np.ndarray) else v, batch[0])
            place += 1

    def _batch(self, generator: Iterator[Any], reader: int, place: int) -> tuple[Any] | None:
        with self._lock:
            if reader != self._readers:
                return None
            if place - self._taken == len(self._untaken):
                try:
                    self._untaken.append(next(generator))
                except StopIteration:
                    return None
            return (self._untaken[place - self._taken],)

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
        self._num_first, self._num_read, self._iterator = 0, 0, None

    def for_adapter(self) -> Iterator[Any]:
        """Returns a generator for Keras's adapter, which takes the first batches from it to see what they are."""
        return self._shelf.read(self._generator)

    def go_on_in(self, adapter: Any) -> None:
        """Has each pipeline begin, as Keras's, with the first batches, and go on with those that nobody has taken."""
        first = adapter._first_batches
        self._num_first = len(first)
        self._shelf.take(self._num_first)
        adapter.generator = lambda: itertools.chain(first, self._shelf.read(self._generator))

    def note_steps(self, iterator: Any, count: int) -> None:
        """Hears how many batches steps have taken from an iterator."""
        if iterator is not self._iterator:
            self._iterator, self._num_read = iterator, 0
        before, self._num_read = self._num_read, self._num_read + count
        self._shelf.take(max(0, self._num_read - self._num_first) - max(0, before - self._num_first))
