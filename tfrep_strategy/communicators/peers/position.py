"""The collectives of functions that this rank is in. The functions write them; the monitor's thread reads them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.cluster.flight_recorder import Collective, name_of
from tfrep_strategy.communicators.peers.reports import Report
from tfrep_strategy.core.calls import Call, line_of


class Stay(NamedTuple):
    """A collective that a rank is in. Ranks in the same collective with different tensors wait for each other forever.

    Attributes:
        place: Name of its place in the program.
        times: Number of times that it has begun there.
        call: The collective.
    """

    place: str
    times: int
    call: Call


class Position:
    """The collectives of a group that a rank is in."""

    def __init__(self) -> None:
        self._notes: dict[str, _Note] = {}
        self._calls: list[Call] = []
        self._last_at: dict[str, Call] = {}

    def enter(self, kind: str, place: str, tensors: Sequence[tf.Tensor], sizes: tf.Tensor) -> Any:
        """Records that a function begins a collective. Eager collectives are reported to the other ranks instead.

        Args:
            kind: Name of the collective.
            place: Name of its place in the program.
            tensors: The tensors that it sends.
            sizes: `sizes_of(tensors)`.

        Returns:
            A tuple for `leave`, whose first item is an operation that must run before the collective. None for an eager
            collective.
        """
        with tf.init_scope():
            if not tf.executing_eagerly():
                return None
        if tf.executing_eagerly():
            return None
        note = self._notes[place] if place in self._notes else self._notes.setdefault(place, _Note())
        with tf.device("CPU:0"):
            number = tf.constant([len(self._calls)])
            dtypes = tuple((tensor.dtype.name, ()) for tensor in tensors)
            self._calls.append(Call(kind, f"in {place}", dtypes, line_of(number.op)))
            self._last_at[place] = self._calls[-1]
            handle = note.handle()
            times = _read(handle)[:1] + 1
            return _write(handle, tf.concat([times, number, sizes], 0)), handle, times

    def leave(self, entered: Any, results: Sequence[tf.Tensor]) -> None:
        """Records that a collective has ended."""
        _, handle, times = entered
        with tf.device("CPU:0"), tf.control_dependencies(results):
            _write(handle, times)

    def read(self) -> Iterator[tuple[Stay, bool]]:
        """Yields the last collective of each place, and whether this rank is in it. Shapes are not kept when it ends."""
        for place, note in list(self._notes.items()):
            times, *where = _read(note.handle()).numpy().tolist()
            if where:
                number, *sizes = where
                call, tensors = self._calls[number], []
                for dtype, _ in call.tensors:
                    rank, *sizes = sizes
                    tensors.append((dtype, tuple(sizes[:rank])))
                    sizes = sizes[rank:]
                yield Stay(place, times, call._replace(tensors=tuple(tensors))), True
            elif times and place in self._last_at:
                yield Stay(place, times, self._last_at[place]), False


class _Note:
    """Holds how often a collective has begun and, while it runs, the number of its call and its sizes."""

    _names = itertools.count()

    def __init__(self) -> None:
        self._name = f"tfrep_position_{next(self._names)}"
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = self._find()
            _write(self._handle, tf.constant([0]))

    def handle(self) -> tf.Tensor:
        """Returns the resource, for use in the graph that is being built.

        A graph finds the resource by name. The gradient of a branch or of a loop could not capture it, since it captures only
        tensors that the branch itself has captured.
        """
        return self._handle if tf.executing_eagerly() else self._find()

    def _find(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=tf.TensorShape([None]), shared_name=self._name)


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)


def _write(handle: tf.Tensor, value: tf.Tensor) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def sizes_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the shapes of tensors as one int32 vector: for each tensor its number of dimensions, then their sizes."""
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return tf.constant([n for tensor in tensors for n in (tensor.shape.rank, *tensor.shape)], tf.int32)
    shapes = [tf.shape(tensor) for tensor in tensors]  # On the device of each tensor, so that nothing is copied.
    with tf.device("CPU:0"):
        return tf.concat([part for shape in shapes for part in (tf.shape(shape), shape)], 0)


_LOOKS = 3
"""The number of looks at the same collective after which a rank reports it."""


class Followed:
    """A position that the monitor checks regularly.

    Args:
        group: The ranks that take part.
        number: The number of the group's communicator.
        position: The position.
        limit: The seconds that the rank may wait for others in a collective.
    """

    def __init__(self, group: Sequence[int], number: int, position: Position, limit: float) -> None:
        self.group, self._number, self.position, self._limit = group, number, position, limit
        self._looks: dict[Stay, int] = {}
        self._until: dict[Stay, float] = {}
        self._since: dict[Stay, float] = {}
        self._ended: dict[Stay, float] = {}

    def look(self) -> list[Report]:
        """Returns a report for each collective that the rank has been in for some time, and another one at the limit."""
        now, read = time.monotonic(), list(self.position.read())
        stays = [stay for stay, is_inside in read if is_inside]
        self._ended = {stay: self._ended.get(stay, time.time()) for stay, is_inside in read if not is_inside}
        self._since = {stay: self._since.get(stay, now) for stay in stays}
        self._looks = {stay: self._looks.get(stay, 0) + 1 for stay in stays}
        self._until = {stay: self._until.get(stay, now + self._limit) for stay in stays}
        late = [stay for stay, until in self._until.items() if now > until]
        self._until |= dict.fromkeys(late, math.inf)
        stuck = [stay for stay, looks in self._looks.items() if looks == _LOOKS]
        return [self._report(stay, False) for stay in stuck] + [self._report(stay, True) for stay in late]

    def known(self) -> tuple[Sequence[int], int, list[Collective]]:
        """Returns the group, how many collectives it had begun at the last look, and the last one of each place."""
        group, since, now = name_of(self.group), self._since, time.monotonic()
        ended = self._ended.items()
        told = [Collective(group, each.times, each.call.what, each.call.line, "done", round(seen, 3)) for each, seen in ended]
        for each, began in since.items():
            told.append(Collective(group, each.times, each.call.what, each.call.line, "entered", seconds=round(now - began, 3)))
        return self.group, sum(each.number for each in told), told

    def _report(self, stay: Stay, is_late: bool) -> Report:
        return Report(self.group, (self._number, stay.place, stay.times), stay.call, waits=False, is_limited=is_late)
