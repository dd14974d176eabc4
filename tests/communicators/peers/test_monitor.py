"""How ranks hear of each other's end. The hub is tested over real connections, the monitor in real processes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfrep_strategy.cluster.flight_recorder import RECORDER, Collective, Whereabouts
from tfrep_strategy.cluster.rendezvous.channel import Channel, connect
from tfrep_strategy.communicators.base import SingleCommunicator
from tfrep_strategy.communicators.peers.hub import Hub
from tfrep_strategy.communicators.peers.monitor import PeerLostError, PeerMonitor
from tfrep_strategy.communicators.peers.position import Position
from tfrep_strategy.communicators.peers.reports import TO_RANKS, Report
from tfrep_strategy.core.calls import Call
from tfrep_strategy.errors import DesyncError

pytestmark = pytest.mark.lane("faults")

ALL = pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
SUM = Call("all_reduce", "sum", (("float32", (3,)),), "train.py:7")
HERE = Whereabouts("train.py:12 in main", idle=3.0)


def inside(call: Call, number: int, group: str) -> Whereabouts:
    now = Collective(group, number, call.what, call.line, "entered", seconds=31.0)
    return Whereabouts(f"{call.line} in step", now=[now], counts={group: number})


@contextlib.contextmanager
def star(size: int, silence: float = 20.0) -> Iterator[list[Channel]]:
    """Gives each rank's connection to a hub, which ends with the block."""
    hub = Hub(size, True, silence)
    with contextlib.ExitStack() as stack:
        connections = [connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", rank) for rank in range(size)]
        for connection in connections:
            stack.enter_context(connection)
        yield connections
        with contextlib.suppress(OSError):
            connections[0].send("ended", False, None)
        hub.join()
        assert not hub._thread.is_alive()


def listens(port: int) -> bool:
    """Whether somebody still listens after 10 seconds."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionError:
            return False
        time.sleep(0.05)
    return True


def answer(connection: Channel, where: Whereabouts) -> None:
    """Tells the hub where the rank is, once it asks."""
    assert connection.poll(10.0), "Nothing came within 10 seconds."
    assert connection.receive() == ("where",)
    connection.send("where", where)


def receive(connection: Channel, where: Whereabouts | None = HERE) -> Any:
    """Returns the next message, and tells the hub meanwhile where the rank is."""
    while True:
        assert connection.poll(10.0), "Nothing came within 10 seconds."
        if (said := connection.receive()) != ("where",):
            return said
        if where is not None:
            connection.send("where", where)


@pytest.mark.lane("quick")
def test_all_hear_how_a_rank_ended() -> None:
    with star(3) as (first, second, third):
        second.send("ended", False, "ValueError: boom")
        assert receive(first) == receive(third) == ("ended", [(1, False, "ValueError: boom")])
        third.close()
        assert receive(first) == ("ended", [(2, True, None)])


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(odd, id=odd.partition(b"\n")[0].decode() + f"-{number}")
        for number, odd in enumerate(
            [
                b"rank\n[1]",
                b"rank\n[7]",
                b"7",
                b"report\n[[7, 0, [], true, false]]",
                b'report\n[[{"start": "0", "stop": 2}, 0, ["barrier", "", [], "a.py:1"], true, false]]',
                b'report\n[[{"start": -1000000000000, "stop": 2}, 0, ["barrier", "", [], "a.py:1"], true, false]]',
                b'report\n[[[[0], [1]], 0, ["barrier", "", [], "a.py:1"], true, false]]',
                b'report\n[[[1, 2], [0, "here", 1], ["barrier", "", [], "a.py:1"], true, true]]',
                b'program lines\n["step", []]',
                b'called\n["call 1", ["f"]]',
                b"ended\n[false, null]",
            ]
        )
    ],
)
@pytest.mark.lane("quick")
def test_whatever_a_rank_says_the_others_are_served(odd: bytes) -> None:
    with star(3) as (first, second, third):
        second.send_written(odd)
        second.send("ended", False, None)
        third.send("ended", False, "ValueError: boom")
        ended = receive(first)[1]
        while len(ended) < 2:
            ended += receive(first)[1]
        assert [2, False, "ValueError: boom"] in [list(each) for each in ended]
        assert sorted(rank for rank, *_ in ended) == [1, 2]


NUMBERS = st.integers(-1, 2) | st.integers()
TEXTS = st.sampled_from(["step", "a.py:1"]) | st.text(max_size=3)
GROUPS = st.just({"start": 0, "stop": 3}) | st.builds(dict, start=NUMBERS, stop=NUMBERS) | st.lists(NUMBERS, max_size=3)
CALLS = st.tuples(TEXTS, TEXTS, st.lists(st.tuples(TEXTS, st.lists(NUMBERS, max_size=2)), max_size=2), TEXTS)
SECONDS = st.none() | st.floats()
WHERES = st.none() | st.builds(
    dict, python=TEXTS, idle=SECONDS, calls=NUMBERS, counts=st.dictionaries(st.sampled_from(["0-2", ""]), NUMBERS, max_size=2)
)
SAID = st.one_of(
    st.tuples(
        st.just("report"),
        st.tuples(GROUPS, NUMBERS | st.tuples(NUMBERS, TEXTS, NUMBERS), CALLS, st.booleans(), st.booleans()),
    ),
    st.tuples(st.just("state"), SECONDS, st.floats(), WHERES),
    st.tuples(st.just("where"), WHERES),
    st.tuples(st.just("late"), st.booleans()),
    st.tuples(st.sampled_from(["program", "called"]), TEXTS, TEXTS | st.tuples(TEXTS, TEXTS)),
    st.tuples(st.just("program lines"), TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=2)),
    st.tuples(st.just("ended"), st.booleans(), st.none() | TEXTS),
    st.tuples(st.just("frozen"), NUMBERS, TEXTS, WHERES),
    st.tuples(st.just("rank"), NUMBERS),
)


@settings(max_examples=300, deadline=None)
@given(said=st.lists(st.tuples(st.sampled_from([1, 2]), SAID), min_size=1, max_size=6))
def test_whatever_ranks_say_rank_0_gets_its_answers(said: list[tuple[int, tuple[Any, ...]]]) -> None:
    with star(3) as connections:
        for rank, each in said:
            with contextlib.suppress(OSError):  # The hub has hung up.
                connections[rank].send(*each)
        for _ in range(2):
            connections[0].send("state", None, 0.0)
            while receive(connections[0])[0] != "silent":
                pass


@pytest.mark.lane("quick")
def test_a_message_that_is_cut_off_keeps_nobody_waiting() -> None:
    with star(4) as (first, second, third, fourth):
        for connection, sent in ((second, b"\0\0"), (third, b"\0\0\1\0late\n[tr")):
            connection._socket.sendall(sent)
        fourth.send("ended", False, None)
        assert receive(first) == ("ended", [(3, False, None)])
        second._socket.sendall(b"\0\x13ended\n[false, null]\0")  # The rest of it, and the beginning of another one.
        assert receive(first) == ("ended", [(1, False, None)])
        third.close()
        assert receive(first) == ("ended", [(2, True, None)])


@pytest.mark.lane("quick")
def test_no_one_else_is_taken_for_a_rank() -> None:
    hub = Hub(2, True, 20.0)

    def come(*first: Any) -> Channel:
        channel = connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, *first)
        assert channel is not None
        return channel

    with come("rank", 0) as first:
        for odd in (("rank", 0), ("rank", 2), ("rank", -1), ("state", None, 0.0), ("late", True)):
            with come(*odd) as other, pytest.raises((EOFError, ConnectionResetError)):
                other.receive()
        with come("rank", 1) as second:
            second.send("ended", False, None)
            assert receive(first) == ("ended", [(1, False, None)])
        first.send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()


def test_all_hear_that_the_first_rank_ended() -> None:
    with star(2) as (first, second):
        first.send("ended", False, None)
        assert receive(second) == ("ended", [(0, False, None)])
        with pytest.raises(EOFError):
            receive(second)


def test_all_hear_why_a_watcher_kills_its_rank() -> None:
    """The connection is open in both processes."""
    with star(3) as (first, second, third), Channel(socket.socket(fileno=os.dup(second.fileno())), TO_RANKS) as lent:
        lent.send("frozen", 1, "is stopped", HERE)
        answer(third, HERE)
        kind, [(rank, lost, seen, lines)] = receive(first)
        assert (kind, rank, lost, seen) == ("ended", 1, True, "is stopped")
        assert receive(third) == (kind, [(rank, lost, seen, lines)])
        assert lines[1] == f"  rank 1: is stopped; before that {HERE.describe()}"
        assert lines[-1] == "The first rank that lags is rank 1."
        with pytest.raises(EOFError):
            receive(second)


def test_it_listens_where_the_others_come() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Sends nothing; it chooses the interface to the world.
        own = probe.getsockname()[0]
    hub = Hub(1, False, 20.0, own)
    assert connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", 0) is None
    with connect(["127.0.0.1", own], hub.port, hub.key, TO_RANKS, "rank", 0) as only:
        only.send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()


def test_ranks_come_over_ipv6() -> None:
    hub = Hub(1, False, 20.0)
    with connect(["::1"], hub.port, hub.key, TO_RANKS, "rank", 0) as only:
        only.send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()


def test_strangers_are_not_admitted() -> None:
    hub = Hub(2, True, 20.0)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(b"\x00\x00\x00\x04okay" * 4)
        assert connect(["127.0.0.1"], hub.port, b"wrong key", TO_RANKS, "rank", 1) is None
    with (
        connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", 0) as first,
        connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", 1) as second,
    ):
        assert not listens(hub.port)  # All are here.
        second.send("ended", False, None)
        assert receive(first) == ("ended", [(1, False, None)])
        first.send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()


def test_silent_strangers_keep_nobody_waiting() -> None:
    """More of them than are greeted at once have come first."""
    hub = Hub(2, True, 20.0)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", hub.port)))
        first, second = (connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", rank) for rank in range(2))
        assert first is not None
        assert second is not None
        with first, second:
            second.send("ended", False, None)
            assert receive(first) == ("ended", [(1, False, None)])
            first.send("ended", False, None)
            hub.join()
    assert not hub._thread.is_alive()
    assert not [thread for thread in _own_threads() if thread.name == "tfrep-reception"]


def test_a_machine_that_owes_an_answer_is_noticed() -> None:
    """As one that owes nothing is, by the probes."""
    with star(1) as [only]:
        others = [each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"]
        [hubs] = [each for each in others if each.raddr == _own_address(only)]
        for descriptor in (hubs.fd, only.fileno()):
            with socket.socket(fileno=os.dup(descriptor)) as own:
                assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 17_000


def _own_address(connection: Channel) -> Any:
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        return own.getsockname()


def test_who_is_silent_is_told_to_those_who_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stopped, or whose native code holds Python's lock, says nothing."""
    monkeypatch.setenv("TFREP_TIMEOUT", "1")
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "3")
    with star(2) as (first, _):
        first.send("state", 0.5, 0.0)
        assert receive(first) == ("silent", {})
        time.sleep(2.0)
        first.send("state", 2.5, 0.0)
        kind, silent = receive(first)
        assert (kind, list(silent)) == ("silent", [1])
        assert silent[1] >= 2.0
        assert not first.poll(0.1)  # It has still time.
        time.sleep(2.0)
        first.send("state", 4.5, 0.0)
        assert receive(first)[0] == "silent"
        kind, (what, *lines) = receive(first, inside(SUM, 3, "0-1"))
        assert kind == "hang"
        assert re.fullmatch(r"Rank 1 has said nothing for [45] seconds, and others wait\.", what)
        where = f"in {SUM.what}, number 3 of ranks 0-1, at train.py:7 for 31 s; Python is at train.py:7 in step"
        assert lines[0] == f"  rank 0: {where}"
        assert re.fullmatch(r"  rank 1: has said nothing for [45] s", lines[1])
        assert lines[2] == "The first rank that lags is rank 1."


def test_a_rank_that_has_ended_well_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "1")
    with star(2) as (first, second):
        second.send("state", None, 5.0)
        receive(second)
        second.send("ended", False, None)
        assert receive(first) == ("ended", [(1, False, None)])
        for _ in range(2):
            first.send("state", 5.0, 0.0)
            assert receive(first)[0] == "silent"


def test_a_scripts_time_limit_for_sockets_does_not_disturb_it() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.2)
    try:
        with star(2) as (first, second):
            time.sleep(0.6)
            second.send("ended", False, None)
            assert receive(first) == ("ended", [(1, False, None)])
    finally:
        socket.setdefaulttimeout(before)


def test_a_group_that_was_made_twice_is_followed_once() -> None:
    monitor, position, before = PeerMonitor.start(SingleCommunicator()), Position(), len(RECORDER.places)
    for group in (position, position, Position()):
        monitor.follow(range(1), group)
    assert len(RECORDER.places) == before + 2
    monitor.close()
    assert len(RECORDER.places) == before


def test_a_refused_collective_is_not_blamed_for_a_later_error() -> None:
    monitor = PeerMonitor.start(SingleCommunicator())

    def fail(refused: Exception | None) -> None:
        with monitor.watching(range(1)):
            if refused:
                monitor.refuse_in_function(refused)
            raise tf.errors.InvalidArgumentError(None, None, "spoiled")

    try:
        with pytest.raises(DesyncError, match="refused"):
            fail(DesyncError("refused"))
        monitor.refuse_in_function(DesyncError("refused in a function that nobody watches"))
        with pytest.raises(tf.errors.InvalidArgumentError, match="spoiled"):
            fail(None)
    finally:
        monitor.close()


def test_equal_calls_are_agreed_on() -> None:
    with star(2) as (first, second):
        elsewhere = SUM._replace(line="train.py:9")  # The line does not matter.
        first.send("report", Report((0, 1), 0, SUM, True))
        second.send("report", Report((0, 1), 0, elsewhere, True))
        assert receive(first) == receive(second) == ("agreed", ((0, 1), 0))


@pytest.mark.parametrize(
    "other",
    [
        SUM._replace(kind="barrier"),
        SUM._replace(option="mean"),
        SUM._replace(tensors=(("int32", (3,)),)),
        SUM._replace(tensors=(("float32", (4,)),)),
        SUM._replace(tensors=()),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_different_calls_are_listed(other: Call, waits: bool) -> None:
    with star(2) as (first, second):
        first.send("report", Report((0, 1), 0, SUM, waits))
        second.send("report", Report((0, 1), 0, other, waits))
        *kind, text = receive(first)
        assert (*kind, text) == receive(second)
    assert kind == (["refused", ((0, 1), 0)] if waits else ["desync"])  # Those who wait can go on afterwards.
    assert f"rank 0: {SUM}" in text
    assert f"rank 1: {other}" in text


def test_those_who_wait_hear_of_a_difference_once_all_have_spoken() -> None:
    with star(3) as (first, second, third):
        first.send("report", Report((0, 1, 2), 0, SUM, True))
        second.send("report", Report((0, 1, 2), 0, SUM._replace(option="max"), True))
        assert not first.poll(1.5)
        third.send("report", Report((0, 1, 2), 0, SUM, True))
        kind, _, text = receive(first)
        assert (kind, text.count("rank ")) == ("refused", 3)


def test_rows_that_are_gathered_may_differ() -> None:
    gather = SUM._replace(kind="all_gather", option="")
    assert gather.fits(gather._replace(tensors=(("float32", (7,)),)))
    assert not gather.fits(gather._replace(tensors=(("float32", (3, 1)),)))


def test_a_silent_rank_is_reported_with_what_it_called_last() -> None:
    with star(3, silence=0.5) as (first, second, third):
        second.send("state", 0.5, 0.0, inside(SUM, 1, "0-2"))
        assert receive(second) == ("silent", {})
        for connection in (first, second, third):
            connection.send("report", Report((0, 1, 2), 0, SUM, True))
        assert receive(first) == receive(third) == ("agreed", ((0, 1, 2), 0))
        later = SUM._replace(line="train.py:20")
        first.send("report", Report((0, 1, 2), 1, later, True, True))
        third.send("report", Report((0, 1, 2), 1, later, True, True))
        answer(third, inside(later, 2, "0-2"))
        _, text = receive(first)
    before = re.escape(f"in {SUM.what}, number 1 of ranks 0-2, at train.py:7")
    assert re.search(rf"rank 1: has said nothing for \d+ s; before that {before}", text), text
    assert f"rank 2: in {later.what}, number 2 of ranks 0-2, at train.py:20 for 31 s;" in text
    assert "The first rank that lags is rank 1." in text


def test_a_rank_that_ended_well_is_reported_at_once_to_those_who_wait() -> None:
    with star(2) as (first, second):
        second.send("ended", False, None)
        assert receive(first)[0] == "ended"
        first.send("report", Report((0, 1), 0, SUM, True, True))
        assert "rank 1: has ended" in receive(first, inside(SUM, 1, "0-1"))[1]


def test_ranks_that_are_stuck_in_a_collective_with_different_tensors() -> None:
    other = SUM._replace(tensors=(("float32", (4,)),))
    with star(3) as (first, second, third):
        for connection, number, call in (
            (first, (0, "step.all_reduce0", 6), SUM),
            (second, (0, "step.all_reduce0", 7), other),  # Of another time.
            (third, (0, "step.all_reduce0", 7), other),
            (first, (0, "step.all_reduce0", 7), other),
            (second, (1, "step.all_reduce0", 8), other),  # Of another communicator.
            (third, (0, "step.all_reduce1", 8), other),  # Of another place.
            (first, (0, "step.all_reduce0", 8), SUM),
        ):
            connection.send("report", Report((0, 1, 2), number, call, False))
        assert not third.poll(1.5)
        second.send("report", Report((0, 1, 2), (0, "step.all_reduce0", 8), other, False))
        kind, text = receive(third)
    assert kind == "desync"
    assert f"rank 0: {SUM}" in text
    assert f"rank 1: {other}" in text
    assert "rank 2: not there; it has last waited in " in text


def test_ranks_that_wait_for_each_other_in_different_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "30")
    other, here, there = SUM._replace(line="train.py:20"), (0, "step.all_reduce0", 7), (0, "end.all_reduce0", 2)
    with star(3) as (first, second, third):
        first.send("report", Report((0, 1, 2), here, SUM, False))
        third.send("report", Report((0, 1, 2), here, SUM, False))
        second.send("report", Report((0, 1, 2), there, other, False))
        first.send("report", Report((0, 1, 2), here, SUM, False, is_limited=True))  # The limit is reached, but rank 1 may be idle.
        assert not third.poll(1.5)
        second.send("state", 31.0, 31.0)
        assert receive(second)[0] == "silent"
        for connection, call in ((first, SUM), (second, other)):
            answer(connection, inside(call, 7, "0-2"))
        kind, text = receive(third, inside(SUM, 7, "0-2"))
    assert kind == "desync"
    assert "a collective in which others have waited for 30 seconds" in text
    for rank, call in enumerate((SUM, other, SUM)):
        assert f"rank {rank}: in {call.what}, number 7 of ranks 0-2, at {call.line} for 31 s" in text
    assert "No rank lags: all are in a collective, of which they have called equally many." in text


def test_ranks_that_are_long_in_one_collective_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "30")
    with star(2) as (first, second):
        for is_late in (False, True):
            for connection in (first, second):
                connection.send("report", Report((0, 1), (0, "step.all_reduce0", 7), SUM, False, is_late))
                connection.send("state", 31.0, 31.0)
        assert [receive(first)[0], receive(first)[0]] == ["silent", "silent"]
        assert not first.poll(2.0)


def _own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tfrep-")}


def _start_and_close(strategy: Any) -> Any:
    before, connections = _own_threads(), len(psutil.Process().net_connections())
    inner = strategy.communicator.inner
    monitor = PeerMonitor.start(inner)
    during = sum(thread.name in ("tfrep-hub", "tfrep-monitor") for thread in _own_threads() - before)
    if strategy.rank == 1:
        monitor.close()
    heard = None
    if strategy.rank == 0:
        with monitor._news:
            assert monitor._news.wait_for(lambda: bool(monitor.ended), 10.0)
        try:
            monitor.check((0, 1))
        except PeerLostError as error:
            heard = str(error), monitor.ended[0].failed
        monitor.check((0,))
    inner.barrier()
    monitor.close()
    return during, len(_own_threads() - before), len(psutil.Process().net_connections()) - connections, heard


@ALL
def test_goodbye_disturbs_nobody_and_leaves_nothing(worker_pool: Any, communicator: str) -> None:
    first, second = worker_pool(communicator, 2).run(_start_and_close)
    assert first[:3] == (2, 0, 0)  # The hub's thread and the monitor's; no connection is left.
    assert second[:3] == (1, 0, 0)
    text, failed = first[3]
    assert text.startswith("Rank 1 ended ")
    assert not failed
