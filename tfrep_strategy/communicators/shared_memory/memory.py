"""Reductions and moves of arrays of any size through a shared memory of fixed size."""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfrep_strategy.cluster.hardware import CHUNK_BYTES

_LINE = 64
"""Bytes of a cache line, which is the alignment that TensorFlow needs to take an array without a copy."""

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


class Memory:
    """The shared memory as seen by one member. It has two places for a chunk of each member, and two for a chunk of the result.

    Members write one chunk while they work on the previous one. So one wait for each chunk is enough. The first chunk of a
    reduction goes to a place that no member reads any more, so it is written before the members meet.

    Args:
        rank: The number of this member.
        size: Number of members.
        memory: The memory, of `bytes_for(size)` bytes.
        wait: Returns when all members have called it.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap, wait: Callable[[], Any]) -> None:
        self._rank, self._size, self._wait = rank, size, wait
        whole = np.frombuffer(memory, np.uint8)
        self._inputs = whole[: 2 * size * CHUNK_BYTES].reshape(2, size, CHUNK_BYTES)
        self._results = whole[2 * size * CHUNK_BYTES :].reshape(2, CHUNK_BYTES)
        self._first = 0
        """The place that is written next. No member reads it any more when all have reached the last wait."""

    def reduce(self, arrays: Sequence[np.ndarray], op: str, begin: Callable[[], Any] | None = None) -> list[np.ndarray]:
        """Reduces arrays over the members, each element in the order of ranks. Each member reduces its part of a chunk.

        Args:
            arrays: Contiguous arrays of one dtype, of the same shapes on all members.
            op: The reduction. For "mean" the result is the sum.
            begin: Called once instead of `wait`.

        Returns:
            The results, the same bits on all members.
        """
        dtype = arrays[0].dtype
        results = [aligned_empty(array.shape, dtype) for array in arrays]
        source, target = Row(arrays), Row(results)
        inputs, reduced = self._inputs.view(dtype), self._results.view(dtype)
        width = CHUNK_BYTES // dtype.itemsize
        chunks = -(-source.size // width)
        for turn in range(chunks + 2):
            place = (self._first + turn) % 2
            if turn < chunks:
                source.read(turn * width, inputs[place, self._rank])
            if 0 < turn <= chunks:
                own = self._own_part(min(width, source.size - (turn - 1) * width), _LINE // dtype.itemsize)
                reduce_in_order(inputs[1 - place, :, own], op, reduced[1 - place, own])
            if turn > 1:
                target.write((turn - 2) * width, reduced[place])
            if turn <= chunks:
                (begin if begin and not turn else self._wait)()
        self._first = (self._first + chunks) % 2
        return results

    def move(self, source: Row, sizes: Sequence[int], starts: Sequence[int], counts: Sequence[int], target: np.ndarray) -> None:
        """Copies a range of bytes from each member.

        Args:
            source: The bytes of this member.
            sizes: The number of bytes of each member.
            starts: The start of each member's range.
            counts: The size of each range in bytes.
            target: The destination of the concatenated ranges.
        """
        places = list(itertools.accumulate(counts, initial=0))
        chunks = -(-max(sizes) // CHUNK_BYTES)
        for turn in range(chunks + 1):
            place = (self._first + turn) % 2
            if turn < chunks:
                source.read(turn * CHUNK_BYTES, self._inputs[place, self._rank])
            if turn:
                begin = (turn - 1) * CHUNK_BYTES
                for member, (start, count) in enumerate(zip(starts, counts, strict=True)):
                    first, last = max(start, begin), min(start + count, begin + CHUNK_BYTES)
                    if first < last:
                        there = places[member] + first - start
                        part = self._inputs[1 - place, member, first - begin : last - begin]
                        target[there : there + last - first] = part
            if turn < chunks:
                self._wait()
        self._first = (self._first + chunks) % 2

    def _own_part(self, count: int, line: int) -> slice:
        """Returns the elements of a chunk that this member reduces: whole cache lines, so that no two members write to one."""
        edges = [count * rank // self._size // line * line for rank in (self._rank, self._rank + 1)]
        return slice(edges[0], count if self._rank + 1 == self._size else edges[1])


class Row:
    """Arrays of one dtype, treated as if they were concatenated.

    Args:
        arrays: Contiguous arrays.

    Attributes:
        size: Number of elements.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [array.reshape(-1) for array in arrays if array.size]
        self._starts = list(itertools.accumulate((array.size for array in self._arrays), initial=0))
        self.size = self._starts[-1]

    def read(self, start: int, into: np.ndarray) -> None:
        """Copies elements from a start into an array, until the array is full or the elements end."""
        for own, other in self._parts(start, into):
            other[...] = own

    def write(self, start: int, source: np.ndarray) -> None:
        """Copies an array to the elements from a start on, until either ends."""
        for own, other in self._parts(start, source):
            own[...] = other

    def _parts(self, start: int, other: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        stop = min(start + len(other), self.size)
        index = bisect.bisect_right(self._starts, start) - 1
        at = start
        while at < stop:
            own = self._arrays[index][at - self._starts[index] : stop - self._starts[index]]
            yield own, other[at - start : at - start + len(own)]
            at, index = at + len(own), index + 1


def reduce_in_order(parts: Sequence[np.ndarray] | np.ndarray, op: str, out: np.ndarray) -> None:
    """Reduces arrays element by element, from the first to the last."""
    ufunc = _UFUNCS[op]
    with np.errstate(all="ignore"):  # An overflow is a result, as on one device.
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Makes an array that TensorFlow takes without a copy."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + _LINE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE
    return memory[start : start + count].view(dtype).reshape(shape)
