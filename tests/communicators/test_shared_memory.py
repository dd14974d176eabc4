"""Shared memory, and how ranks meet. Here members are threads, which use the same sockets and the same memory as processes do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from raising import refuses

from tfrep_strategy.cluster.hardware import bytes_for, new_memory
from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.communicators.shared_memory import SharedMemoryCommunicator
from tfrep_strategy.communicators.shared_memory.links import Links, meet, socket_name
from tfrep_strategy.communicators.shared_memory.memory import Memory, Row, aligned_empty, reduce_in_order
from tfrep_strategy.errors import PeerError

CHUNK = 1 << 20
LIMIT = 30.0


def name_of(test: Any) -> str:
    return f"{os.getpid()}/{test.__name__}"


def together(size: int, work: Callable[[Links], Any], run: str) -> list[Any]:
    """Calls `work` on each member at once."""

    def member(rank: int) -> Any:
        links = meet(run, rank, size, bytes_for(size), LIMIT)
        try:
            return work(links)
        finally:
            links.close()

    with ThreadPoolExecutor(size) as threads:
        return [each.result(LIMIT) for each in [threads.submit(member, rank) for rank in range(size)]]


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    numbers = np.random.RandomState(rank).standard_normal(count) * 100
    return np.array([numbers, numbers[::-1]]).astype(dtype)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_reductions(size: int) -> None:
    """Of less than a chunk, of whole chunks, of some more, and of arrays that end within one; each in the order of ranks."""
    counts = [0, 1, 7, CHUNK // 8, CHUNK // 8 + 3, 3 * CHUNK // 8]
    cases = [("float32", "sum"), ("float64", "product"), ("int32", "min"), ("int64", "max")]

    def reduced(links: Links) -> list[list[np.ndarray]]:
        memory = Memory(links.rank, size, links.memory, links.exchange)
        return [memory.reduce([values(links.rank, count, dtype) for count in counts], op) for dtype, op in cases]

    found = together(size, reduced, name_of(test_reductions))
    for case, (dtype, op) in enumerate(cases):
        for i, count in enumerate(counts):
            want = values(0, count, dtype)
            for rank in range(1, size):
                want = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op](
                    want, values(rank, count, dtype)
                )
            for member in found:
                assert member[case][i].tobytes() == want.tobytes(), (dtype, op, count)


def test_who_waits_long_uses_no_core() -> None:
    def cpu_seconds(links: Links) -> float:
        if links.rank:
            time.sleep(2.0)
            links.exchange()
            return 0.0
        start = time.thread_time()
        links.exchange()
        return time.thread_time() - start

    assert together(2, cpu_seconds, name_of(test_who_waits_long_uses_no_core))[0] < 0.5


def test_collectives_of_all_kinds_follow_each_other_in_the_memory() -> None:
    """Each begins where no member reads any more, whatever came before it and however long it was."""
    counts = [CHUNK // 4 * factor + 7 for factor in (1, 2, 3, 0, 1)]

    def found(links: Links) -> list[bool]:
        run = SimpleNamespace(local_rank=links.rank, local_size=3)
        communicator = SharedMemoryCommunicator(run, links)
        results = []
        for turn, count in enumerate(counts * 4):
            own = np.full([count], links.rank + turn, np.float32)
            (total,) = communicator.reduce_arrays([own], "sum")
            rows = communicator.gather_array(own[: count - links.rank])
            (first,) = communicator.broadcast_arrays([own], 2)
            whole = np.concatenate([np.full([count - rank], rank + turn, np.float32) for rank in range(3)])
            results += [bool((total == 3 + 3 * turn).all()), np.array_equal(rows, whole), bool((first == 2 + turn).all())]
            integers, floats = communicator.reduce_arrays([own.astype(np.int64), own], "max")
            results += [bool((integers == 2 + turn).all()), bool((floats == 2 + turn).all())]
        return results

    for member in together(3, found, name_of(test_collectives_of_all_kinds_follow_each_other_in_the_memory)):
        assert all(member)


def test_a_bucket_changes_no_bit() -> None:
    def reduced(links: Links) -> tuple[bytes, bytes]:
        memory = Memory(links.rank, 3, links.memory, links.exchange)
        own = values(links.rank, 1001, "float32")
        return memory.reduce([own], "sum")[0].tobytes(), memory.reduce([np.ones(12345, "float32"), own], "sum")[1].tobytes()

    found = together(3, reduced, name_of(test_a_bucket_changes_no_bit))
    assert len({bits for member in found for bits in member}) == 1


def test_moves_of_parts() -> None:
    """Each member gets another range of each other one; one member has nothing, and one has several chunks."""
    lengths = [0, 5, 3 * CHUNK + 11]
    whole = [np.random.RandomState(rank).bytes(length) for rank, length in enumerate(lengths)]

    def moved(links: Links) -> bytes:
        memory = Memory(links.rank, 3, links.memory, links.exchange)
        starts = [length * links.rank // 3 for length in lengths]
        counts = [length * (links.rank + 1) // 3 - start for length, start in zip(lengths, starts, strict=True)]
        target = aligned_empty([sum(counts)], np.dtype(np.uint8))
        own = np.frombuffer(whole[links.rank], np.uint8)
        memory.move(Row([own[:3], own[3:]]), lengths, starts, counts, target)
        return target.tobytes()

    for rank, found in enumerate(together(3, moved, name_of(test_moves_of_parts))):
        assert found == b"".join(part[len(part) * rank // 3 : len(part) * (rank + 1) // 3] for part in whole)


def test_arrays_are_where_tensorflow_needs_no_copy() -> None:
    for shape in ([], [3], [1000, 7]):
        array = aligned_empty(shape, np.dtype(ml_dtypes.bfloat16))
        assert array.ctypes.data % 64 == 0
        assert (array.shape, array.dtype) == (tuple(shape), ml_dtypes.bfloat16)


def test_overflows_are_results() -> None:
    out = np.empty(1, "float32")
    reduce_in_order([np.array([3e38], "float32"), np.array([3e38], "float32")], "sum", out)
    assert np.isinf(out[0])


def test_a_scripts_time_limit_for_sockets_is_none_of_the_links() -> None:
    """Members wait longer than that for each other: rank 1 for rank 2, and in a group."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.2)
    try:

        def work(links: Links) -> Any:
            group = links.subgroup([0, 1], bytes_for(2)) if links.rank < 2 else None
            time.sleep(0.6 * links.rank)
            told = [links.exchange(b"%d" % links.rank)]
            time.sleep(0.6 * links.rank)
            return [*told, group.exchange(b"in a group")] if group else told

        found = together(3, work, name_of(test_a_scripts_time_limit_for_sockets_is_none_of_the_links))
    finally:
        socket.setdefaulttimeout(before)
    assert found == [*[[[b"0", b"1", b"2"], [b"in a group"] * 2]] * 2, [[b"0", b"1", b"2"]]]


def test_groups_have_connections_of_their_own() -> None:
    def work(links: Links) -> Any:
        members = [0, 2, 3]
        group = links.subgroup(members, 4096) if links.rank in members else None
        heard = group.exchange(b"g%d" % links.rank) if group else None
        if group:
            group.memory[links.rank] = links.rank + 1
            group.exchange()
        # Rank 1 has sent its message to all meanwhile.
        return links.exchange(b"%d" % links.rank), heard, bytes(group.memory[:4]) if group else None

    for rank, (all_heard, heard, seen) in enumerate(together(4, work, name_of(test_groups_have_connections_of_their_own))):
        assert all_heard == [b"0", b"1", b"2", b"3"]
        assert heard == (None if rank == 1 else [b"g0", b"g2", b"g3"])
        assert seen == (None if rank == 1 else b"\1\0\3\4")


@contextlib.contextmanager
def with_a_process(run: str) -> Iterator[tuple[Links, int]]:
    """Gives rank 0 of 2, and the process that is rank 1, which says something and then does nothing."""
    other = os.fork()
    if not other:
        try:
            links = meet(run, 1, 2, 4096, LIMIT)
            links.exchange(b"met")
            signal.pause()
        finally:
            os._exit(1)  # Else a failure would go on with the tests of its parent.
    try:
        with contextlib.closing(meet(run, 0, 2, 4096, LIMIT)) as links:
            assert links.exchange(b"a") == [b"a", b"met"]
            yield links, other
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def test_nothing_is_left_of_ranks_that_were_killed() -> None:
    """The system frees what has no name with the last process that has it open. It is in no folder, such as `/dev/shm`."""
    memory = new_memory(4096)
    try:
        assert os.readlink(f"/proc/self/fd/{memory}") == "/memfd:tfrep (deleted)"
        assert os.fstat(memory).st_nlink == 0
    finally:
        os.close(memory)
    assert socket_name(name_of(with_a_process)).startswith("@tfrep-")


def test_a_killed_rank_is_noticed_at_once() -> None:
    with with_a_process(name_of(test_a_killed_rank_is_noticed_at_once)) as (links, other):
        began = time.monotonic()
        threading.Timer(0.3, os.kill, (other, signal.SIGKILL)).start()
        for _ in range(2):
            with pytest.raises(PeerError, match="Rank 1 has ended its connection"):
                links.exchange()
        assert time.monotonic() - began < 5.0


def test_a_stopped_rank_is_waited_for_until_the_wait_is_aborted() -> None:
    with with_a_process(name_of(test_a_stopped_rank_is_waited_for_until_the_wait_is_aborted)) as (links, other):
        os.kill(other, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(links.exchange)
            time.sleep(0.3)
            assert not waiting.done()
            links.abort("It was long enough.")
            with pytest.raises(PeerError, match="It was long enough"):
                waiting.result(LIMIT)


def test_a_forked_child_keeps_no_connection() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Links(0, [None, first], new_memory(4096))
    with second, contextlib.closing(links):
        child = os.fork()
        if not child:
            time.sleep(20.0)
            os._exit(0)
        try:
            second.settimeout(5.0)
            links.close()
            assert second.recv(10) == b""
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_strangers_keep_nobody_waiting() -> None:
    """They are silent, or say what is no greeting. Another user is not even heard."""
    run = name_of(test_strangers_keep_nobody_waiting)
    name = Place(socket_name(run), 0, 3, has_name=True).target
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(3))
        ranks = [threads.submit(meet, run, 0, 3, 4096, LIMIT)]
        for each in (b"", b"garbage", b"\xff" * 900, b"[]", b"{}", b'{"rank": 7, "size": 3, "version": 0}'):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            until(lambda stranger=stranger: not stranger.connect_ex(name))
            if each:
                stranger.send(each)
        if not os.geteuid():
            assert heard_by_nobody(name) == b"the end"
        ranks += [threads.submit(meet, run, rank, 3, 4096, LIMIT) for rank in (1, 2)]
        for links in [each.result(LIMIT) for each in ranks]:
            links.close()
    assert socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect_ex(name)  # Nobody listens any more.


def heard_by_nobody(name: str) -> bytes:
    """What the user of that name hears who connects."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(5.0)
                link.connect(name)
                heard = b""
                with contextlib.suppress(ConnectionResetError):
                    heard = link.recv(100)
                os.write(write, heard or b"the end")
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, "rb") as told:
        return told.read()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_does_not_belong_to_the_run_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are all others, since a run has each rank once."""
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting._LINGER_SECONDS", 0.5)
    run = name_of(test_who_does_not_belong_to_the_run_is_told_why)
    with ThreadPoolExecutor(3) as threads:
        for ranks, told in (
            ([(0, 3), (1, 3), (1, 3)], "Two processes say that they are rank 1: "),
            ([(0, 3), (1, 2)], "Rank 1 says that there are 2 ranks, and rank 0 that there are 3."),
            ([(0, 2), (0, 2)], "Two processes say that they are rank 0: "),
        ):
            meetings = []
            for rank, size in ranks:
                meetings.append(threads.submit(meet, run, rank, size, 4096, LIMIT))
                until(lambda: is_listening(run))
            for each in meetings:
                with refuses(told=[told], hint="", rendezvous=...):
                    each.result(LIMIT)


def is_listening(run: str) -> bool:
    with socket.socket(socket.AF_UNIX) as stranger:
        return not stranger.connect_ex(Place(socket_name(run), 0, 2, has_name=True).target)


def test_who_is_missing_is_named() -> None:
    run = name_of(test_who_is_missing_is_named)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(meet, run, rank, 4, 4096, 1.0) for rank in (0, 2)]
        with refuses(PeerError, "TFREP-E013", told=["Ranks 1, 3 have not come"], hint="TFREP_RENDEZVOUS_TIMEOUT"):
            ranks[0].result(LIMIT)
        with refuses(PeerError, "TFREP-E013", told=["Ranks 1, 3 have not come"], hint="TFREP_RENDEZVOUS_TIMEOUT"):
            ranks[1].result(LIMIT)
    with refuses(PeerError, "TFREP-E013", told=["Rank 0 cannot be reached"]):
        meet(run, 1, 2, 4096, 0.1)


def test_all_are_told_that_there_is_no_memory() -> None:
    run = name_of(test_all_are_told_that_there_is_no_memory)
    with ThreadPoolExecutor(3) as threads:
        ranks = [threads.submit(meet, run, rank, 3, 1 << 62, LIMIT) for rank in range(3)]
        for rank in ranks:
            with refuses(code="TFREP-E006", hint="ulimit", num_bytes=1 << 62):
                rank.result(LIMIT)


def test_what_cannot_be_connected_is_refused() -> None:
    place = {"rank": 0, "size": 2, "local_rank": 0, "name": "Pair"}
    with refuses(code="TFREP-E006", hint='"tf"', size=2, local_size=1):
        SharedMemoryCommunicator(SimpleNamespace(**place, local_size=1, run_name="a"))
    with refuses(told=["Pair"], hint="set MASTER_ADDR", communicator="shared_memory"):
        SharedMemoryCommunicator(SimpleNamespace(**place, local_size=2, run_name=""))
