"""Collectives between the ranks of one machine through shared memory. They need no port, daemon or other software.

Each rank reduces its part of the elements over the inputs of all ranks, in the order of ranks. So an element gets the same bits on
all ranks, wherever it is in a bucket. The ranks agree on shared memory over the communicator that already connects them.
"""

from __future__ import annotations

import collections
import functools
import itertools
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.hardware import MOST_IN_MESSAGE, MOST_SHARING, SHARES_MEMORY, bytes_for, problem_of_sharing
from tfrep_strategy.cluster.transports import no_shared_memory
from tfrep_strategy.communicators.base import Arrays, Communicator, HostCommunicator, SingleCommunicator
from tfrep_strategy.communicators.order import structural_name
from tfrep_strategy.communicators.peers.reports import describe_difference
from tfrep_strategy.communicators.shared_memory.links import LONGEST_MESSAGE, Links, meet
from tfrep_strategy.communicators.shared_memory.memory import Memory, Row, aligned_empty, reduce_in_order
from tfrep_strategy.core.calls import Call, user_line
from tfrep_strategy.core.limits import meeting_seconds
from tfrep_strategy.errors import ConfigurationError, DesyncError, TfrepError, message, warn


class _Running(NamedTuple):
    """The current collective of a rank: its kind, an argument, its place in the program, and the line of the user's code."""

    kind: str
    option: str
    place: str
    line: str


class SharedMemoryCommunicator(HostCommunicator):
    """Runs collectives between ranks of one machine, on the CPU. Tensors of a GPU are copied.

    Args:
        environment: Provides the rank, the size, and an id of this run on this machine.
        links: The connections of a subgroup. Default: connections to all ranks, which meet.
        ranks: The members of a subgroup, by their ranks in the run.
        seconds: The time limit for all ranks to meet. Default: from `meeting_seconds`.

    Raises:
        ConfigurationError: The ranks are on several machines, the environment has no id of the run, the system is not Linux,
            or two processes have the same rank.
        PeerError: Not all ranks arrive in time.
    """

    name = "shared_memory"
    _made: ClassVar[collections.Counter[str]] = collections.Counter()
    """Number of communicators that this process has made for each run."""

    def __init__(
        self, environment: Any, links: Links | None = None, ranks: Sequence[int] = (), seconds: float | None = None
    ) -> None:
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._links = links or _all_linked(environment, meeting_seconds() if seconds is None else seconds)
        self.rank, self.size = self._links.rank, self._links.size
        self._ranks = ranks or range(self.size)
        self._label = f"group{'-'.join(map(str, ranks))}." if ranks else ""
        self._memory = Memory(self.rank, self.size, self._links.memory, self._links.exchange)
        self._one_at_a_time = threading.Lock()
        self._running = _Running("", "", "", "")
        self.on_refusal: Callable[[Exception], None] = lambda error: None

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        if len(ranks) == 1:
            return SingleCommunicator()
        with self._one_at_a_time:
            links = self._links.subgroup(ranks, bytes_for(len(ranks)))
        return SharedMemoryCommunicator(self, links, [self._ranks[rank] for rank in ranks])

    def abort(self, reason: str) -> None:
        self._links.abort(reason)

    def close(self) -> None:
        self._links.close()

    def _call(self, kind: str, option: str, talk: Callable[[Arrays], Arrays], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        place = structural_name(self._label + kind)
        line = "" if tf.executing_eagerly() else user_line()
        running = _Running(kind, option, place, line)

        def talk_alone(arrays: Arrays) -> Arrays:
            with self._one_at_a_time:
                self._running = running
                try:
                    return talk(arrays)
                except (ConfigurationError, DesyncError):  # Raised before data was sent, or by all ranks.
                    raise
                except BaseException as error:  # Other ranks must not wait for data of this one.
                    self.abort(f"A collective has failed: {error!r}")
                    raise

        return super()._call(kind, option, talk_alone, tensors)

    def reduce_arrays(self, arrays: Arrays, op: str) -> Arrays:
        by_dtype: dict[np.dtype, list[int]] = {}
        for i, array in enumerate(arrays):
            by_dtype.setdefault(array.dtype, []).append(i)
        ordered = [arrays[i] for members in by_dtype.values() for i in members]
        size = sum(array.nbytes for array in ordered)
        begin: Any = functools.partial(self._begin, ordered, [size])
        messages = begin()[1] if size <= MOST_IN_MESSAGE else None
        results: list[Any] = [None] * len(arrays)
        start = 0
        for members in by_dtype.values():
            own = [arrays[i] for i in members]
            if messages is None:
                reduced = self._memory.reduce(own, op, begin)
                begin = None
            else:
                reduced = _reduced_from(messages, start, own, op)
                start += sum(array.nbytes for array in own)
            for i, result in zip(members, reduced, strict=True):
                results[i] = result
        return results

    def gather_array(self, array: np.ndarray) -> np.ndarray:
        received, rows = self._moved([array], [len(array)], by_rows=True, free_rows=True)
        return received.view(array.dtype).reshape(sum(rows), *array.shape[1:])

    def broadcast_arrays(self, arrays: Arrays, root: int) -> Arrays:
        size = sum(array.nbytes for array in arrays)
        received, _ = self._moved(arrays, [size if self.rank == root else 0])
        results, start = [], 0
        for array in arrays:
            results.append(received[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
            start += array.nbytes
        return results

    def scatter_array(self, array: np.ndarray, rows: Sequence[int], op: str) -> np.ndarray:
        received, _ = self._moved([array], list(rows), by_rows=True)
        result = aligned_empty((rows[self.rank], *array.shape[1:]), array.dtype)
        reduce_in_order(received.view(array.dtype).reshape(self.size, *result.shape), op, result)
        return result

    def exchange_rows(self, array: np.ndarray, splits: np.ndarray) -> Arrays:
        received, rows = self._moved([array], splits.tolist(), by_rows=True, free_rows=True)
        return [received.view(array.dtype).reshape(sum(rows), *array.shape[1:]), np.array(rows, np.int32)]

    def _moved(
        self, arrays: Arrays, rows: list[int], by_rows: bool = False, free_rows: bool = False
    ) -> tuple[np.ndarray, list[int]]:
        """Receives bytes from each member.

        Args:
            arrays: The data of this member. All members have the same dtypes and shapes, except for free rows.
            rows: The number of rows, or bytes, to send: one number for all receivers, or one for each.
            by_rows: Whether there is one array, and `rows` counts its rows.
            free_rows: Whether the number of rows may differ between members.

        Returns:
            The received bytes, in the order of members, and the number of rows from each.
        """
        unit = arrays[0][:0].itemsize * int(np.prod(arrays[0].shape[1:], dtype=np.int64)) if by_rows else 1
        table, said = self._begin(arrays, rows, unit, free_rows)
        column = self.rank if len(rows) > 1 else 0
        starts = [unit * sum(each[:column]) for each in table]
        counts = [unit * each[column] for each in table]
        received = aligned_empty([sum(counts)], np.dtype(np.uint8))
        if said is None:
            sizes = [unit * sum(each) for each in table]
            source = Row([array.reshape(-1).view(np.uint8) for array in arrays] if sizes[self.rank] else [])
            self._memory.move(source, sizes, starts, counts, received)
        else:
            parts = [each[start : start + count] for each, start, count in zip(said, starts, counts, strict=True)]
            received[...] = np.frombuffer(b"".join(parts), np.uint8)
        return received, [each[column] for each in table]

    def _begin(
        self, arrays: Arrays, numbers: list[int], unit: int = 1, free_rows: bool = False
    ) -> tuple[list[list[int]], list[bytes] | None]:
        """Begins a collective with a message to all members that describes the call.

        Args:
            arrays: The data of this member.
            numbers: The sizes to send, in units.
            unit: The bytes of a unit.
            free_rows: Whether the number of rows may differ between members.

        Returns:
            The numbers of each member; and the data of each if all of it fitted into the messages, else None.

        Raises:
            DesyncError: The members called different collectives. They can continue.
            PeerError: A member has ended.
        """
        called = _checksum(self._running[:3], tuple((array.dtype, array.shape[free_rows:]) for array in arrays))
        head = _head(len(numbers))
        size = unit * sum(numbers)
        data = b"".join([array.tobytes() for array in arrays]) if 0 < size <= MOST_IN_MESSAGE else b""
        said = self._links.exchange(head.pack(called, *numbers) + data)
        if any(each[:4] != called for each in said):
            self._refuse(arrays)
        table = [list(head.unpack_from(each))[1:] for each in said]
        is_small = max(unit * sum(each) for each in table) <= MOST_IN_MESSAGE
        return table, [each[head.size :] for each in said] if is_small else None

    def _refuse(self, arrays: Arrays) -> None:
        """Raises the same error on all members. None of them has sent more than the first message of a collective."""
        kind, option, place, line = self._running
        tensors = tuple((array.dtype.name, array.shape) for array in arrays)
        own = Call(kind, ", ".join(filter(None, [option, f"in {place}"])), tensors, line or user_line())
        words = [each.decode(errors="replace") for each in self._links.exchange(str(own).encode()[: LONGEST_MESSAGE // 2])]
        text = describe_difference("Ranks called different collectives.", list(zip(self._ranks, words, strict=True)))
        error = DesyncError(text)
        if line:  # TensorFlow replaces the errors of a function.
            self.on_refusal(error)
        raise error


@functools.lru_cache(1024)
def _checksum(running: tuple[str, ...], shapes: tuple[Any, ...]) -> bytes:
    return struct.pack("<I", zlib.crc32(repr((running, shapes)).encode()))


@functools.lru_cache(16)
def _head(count: int) -> struct.Struct:
    return struct.Struct(f"<4s{count}q")


def _reduced_from(messages: Sequence[bytes], start: int, own: Arrays, op: str) -> Arrays:
    """Reduces arrays of one dtype, which begin at byte `start` in the message of each member."""
    dtype, ends = own[0].dtype, list(itertools.accumulate(array.size for array in own))
    whole = aligned_empty([ends[-1]], dtype)
    reduce_in_order([np.frombuffer(each, dtype, ends[-1], start) for each in messages], op, whole)
    return [whole[end - array.size : end].reshape(array.shape) for end, array in zip(ends, own, strict=True)]


def _all_linked(environment: Any, seconds: float) -> Links:
    """Connects all ranks of the run."""
    if not SHARES_MEMORY:
        raise ConfigurationError(
            message("Shared memory needs Linux.", hint='use communicator="tf".', code="TFREP-E006", communicator="shared_memory")
        )
    if environment.local_size < environment.size:
        raise ConfigurationError(
            message(
                "The ranks are on several machines, which have no shared memory.",
                hint='use communicator="tf" or "horovod".',
                code="TFREP-E006",
                size=environment.size,
                local_size=environment.local_size,
            )
        )
    if not environment.run_name:
        raise ConfigurationError(
            message(
                f"{environment.name} does not tell which ranks belong together.",
                hint="set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a number that no other run on this machine has.",
                communicator="shared_memory",
            )
        )
    made = SharedMemoryCommunicator._made
    made[environment.run_name] += 1
    run = f"{environment.run_name}/{made[environment.run_name]}"
    return meet(run, environment.rank, environment.size, bytes_for(environment.size), seconds)


_MEETING_SECONDS = 15.0
"""The time limit for ranks that are all there to meet. They never do if they do not share the names of sockets."""


def over_shared_memory(connected: Communicator, environment: Any, *, has_gpu: bool) -> Communicator:
    """Moves all ranks to shared memory, or none. Every rank must call it.

    Each rank tells the others whether it can share memory. If all can, they try to meet, and then compare whether they succeeded.

    Args:
        connected: Connects all ranks. It stays in use if they cannot share memory; rank 0 warns if they are on one machine.
        environment: Provides the rank, the size, and an id of this run on this machine.
        has_gpu: Whether this rank has a GPU. Then no rank moves.

    Returns:
        A communicator over shared memory on all ranks, or `connected` on all.
    """
    stays = has_gpu or not SHARES_MEMORY or environment.local_size < environment.size or environment.size > MOST_SHARING
    states = connected.all_gather_object((stays, None if stays else problem_of_sharing(environment.size)))
    if any(stays for stays, _ in states):
        return connected
    made, problems = None, [problem for _, problem in states]
    if not any(problems):
        problem = None
        try:
            made = SharedMemoryCommunicator(environment, seconds=_MEETING_SECONDS)
        except (TfrepError, OSError) as error:
            problem = str(error)
        problems = connected.all_gather_object(problem)
    if made is not None and not any(problems):
        return made
    if made is not None:
        made.close()
    if environment.rank == 0:
        rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
        warn(no_shared_memory(f"on rank {rank}, {problem}", connected.name))
    return connected
