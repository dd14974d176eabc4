"""What functions that replicas share read themselves, by `for x in data` and `next(iterator)`.

Each process reads all batches, and a replica takes its rows of each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import OwnedIterator, loops_of_autograph
from tfrep_strategy.partitioner import marks
from tfrep_strategy.pipelines.batch_maps import rows_are_alike

_traced = threading.local()

Check = Callable[[Sequence[tf.Tensor]], None]
"""Refuses tensors that other ranks have otherwise."""


@contextlib.contextmanager
def shared_reading(replicas: int, check: Check, alike: dict[int, bool], read: list[Any]) -> Iterator[None]:
    """Has replicas share the batches that functions read which are traced now.

    Args:
        replicas: How many they are.
        check: Adds a comparison of what ranks have read.
        alike: By the id of a data set, or an iterator, that a function is given: whether all tensors of a batch have as many rows.
        read: Gets the tensors whose rows replicas share.
    """
    _traced.now = replicas, check, alike, read
    try:
        yield
    finally:
        _traced.now = None


class SharedIterator(OwnedIterator):
    """An iterator that a function is given, in its trace: replicas share the batches that it reads.

    Args:
        traced: The iterator.
    """

    def __init__(self, traced: OwnedIterator) -> None:
        components = tf.nest.flatten(traced, expand_composites=True)
        super().__init__(components=components, element_spec=traced.element_spec)

    def __next__(self) -> Any:
        return self._shared(super().__next__())

    def get_next(self) -> Any:
        return self._shared(super().get_next())

    def _shared(self, element: Any) -> Any:
        change = _sharing(self)
        return element if change is None else change(element)


def have_rows_alike(data: Any) -> bool:
    """Returns whether all tensors of a batch of a data set, or of an iterator, are known to have as many rows."""
    read = data if isinstance(data, tf.data.Dataset) else data._dataset
    return read is not None and rows_are_alike(read)


def _sharing(data: Any) -> Callable[[Any], Any] | None:
    """Returns what marks batches that are read; None where no function is traced for replicas."""
    now = getattr(_traced, "now", None)
    if now is None:
        return None
    replicas, check, alike, read = now
    known = alike.get(id(data))
    are_alike = have_rows_alike(data) if known is None else known

    def marked(element: Any) -> Any:
        tensors = tf.nest.flatten(element)
        if not all(isinstance(x, tf.Tensor) and x.dtype != tf.variant for x in tensors):
            return element
        check(tensors)
        places = [i for i, x in enumerate(tensors) if x.shape.rank]
        if places and are_alike:
            own = marks.batch([tensors[i] for i in places], replicas)
            read.extend(own)
            for place, rows in zip(places, own, strict=True):
                tensors[place] = rows
        return tf.nest.pack_sequence_as(element, tensors)

    return marked


_over_data, _over_iterator = loops_of_autograph._registry[tf.data.Dataset], loops_of_autograph._registry[OwnedIterator]


def loop(data: Any, extra_test: Any, body: Callable[[Any], Any], *state: Any) -> None:
    """Makes a loop over a data set one of the graph over an iterator. It would be one of functions of the data set."""
    change, is_data = _sharing(data), isinstance(data, tf.data.Dataset)
    if change is None:
        (_over_data if is_data else _over_iterator)(data, extra_test, body, *state)
    else:
        iterator = OwnedIterator(data) if is_data else data
        _over_iterator(iterator, extra_test, lambda element: body(change(element)), *state)
