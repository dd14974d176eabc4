"""Messages between processes: what is read, by whom, and what is not. Both ends are in this process."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import pickle
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfrep_strategy.cluster.rendezvous import assembly, meeting
from tfrep_strategy.cluster.rendezvous.channel import (
    _HELLO,
    LONGEST,
    Channel,
    Schema,
    UnreadableError,
    WrongSecretError,
    connect,
    introduced,
    write,
)
from tfrep_strategy.cluster.rendezvous.introductions import STATEMENT, Reception, listen
from tfrep_strategy.communicators.peers import reports

pytestmark = pytest.mark.lane("quick")

KEY, OTHER = b"s" * 32, b"o" * 32
SCHEMA = Schema({"rank": tuple[int], "line": tuple[str], "any": tuple[dict[str, Any]]})
SCHEMAS = [SCHEMA, STATEMENT, assembly.TO_SEATS, assembly._TO_ASSEMBLY, meeting._TO_GUESTS, reports.TO_HUB, reports.TO_RANKS]
LIMIT = 10.0
MEMORY = 1 << 20


@contextlib.contextmanager
def ends(seconds: int = 1, longest: int = LONGEST) -> Iterator[tuple[socket.socket, Channel]]:
    """Gives an end that sends bytes, and one that receives messages."""
    here, there = socket.socketpair()
    with here, Channel(there, SCHEMA, seconds, longest) as channel:
        yield here, channel


def in_a_thread(do: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Calls a function that may fail."""

    def work() -> None:
        with contextlib.suppress(Exception):
            do(*arguments)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


kinds = st.sampled_from([name for schema in SCHEMAS for name in schema._kinds])
contents = st.sampled_from(
    [
        b"[]",
        b"[1]",
        b'["x"]',
        b"[{}]",
        b"[null]",
        b"[[[1]]]",
        b'[{"text":"x","lost":true}]',
        b"[1e999]",
        b"[1",
        b"]",
        b'[[1,0,["a","",[],"b"],true]]',
        b'[[{"start":-1000000000,"stop":2},0,["a","",[],"b"],true]]',
    ]  # fmt: skip
)
bodies = st.binary(max_size=40) | st.tuples(kinds, contents | st.binary(max_size=40)).map(
    lambda said: said[0].encode() + b"\n" + said[1]
)
streams = st.lists(bodies.map(framed) | st.binary(max_size=9), max_size=3).map(b"".join)


@settings(max_examples=1000, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 10**9)),
    cuts=st.lists(st.integers(1, 40)),
    end=st.sampled_from([b"", b"\0\0\0\x08rank", framed(b"7")]),
)
def test_messages_arrive_in_any_parts(numbers: list[int], cuts: list[int], end: bytes) -> None:
    sent = b"".join(framed(write("rank", number)) for number in numbers) + end
    found = []
    with ends() as (here, channel):
        for cut in cuts:
            here.sendall(sent[:cut])
            sent = sent[cut:]
            found += channel.arrived("end")
        here.sendall(sent)
        here.close()
        while ("end",) not in found:
            found += channel.arrived("end")
    assert found == [*(("rank", number) for number in numbers), ("end",)]


@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=streams, schema=st.sampled_from(SCHEMAS))
@pytest.mark.lane("faults")
def test_whatever_comes_is_read_or_refused(sent: bytes, schema: Schema) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ends() as (here, channel):
        channel.schema = schema
        here.sendall(sent)
        here.close()
        try:
            while True:
                assert channel.receive()[0] in schema._kinds
        except (EOFError, OSError):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_768  # In kB.


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_data(depth: int) -> None:
    with pytest.raises(UnreadableError):
        SCHEMA.read(b"any\n" + b"[" * depth + b"]" * depth)


def test_what_no_encoding_has_is_sent_as_well_as_it_can_be() -> None:
    assert SCHEMA.read(write("line", "\xe9t\xe9 \udcff.py")) == ("line", "\xe9t\xe9 ?.py")
    assert SCHEMA.read(write("any", {"much": float("inf")})) == ("any", {"much": float("inf")})


def test_no_memory_is_taken_for_what_is_only_announced() -> None:
    with ends(longest=LONGEST) as (here, channel):
        here.sendall(LONGEST.to_bytes(4, "big") + b"line")
        here.close()
        tracemalloc.start()
        try:
            with pytest.raises(EOFError):
                channel.receive()
            assert tracemalloc.get_traced_memory()[1] < MEMORY
        finally:
            tracemalloc.stop()


def test_a_message_that_is_too_long_is_not_read() -> None:
    with ends(longest=100) as (here, channel):
        here.sendall(framed(write("line", "x" * 101)))
        with pytest.raises(UnreadableError, match="a message of 110 bytes"):
            channel.receive()


@pytest.mark.parametrize("sent", [b"\x00", framed(write("rank", 1))[:-1]])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_message_that_is_cut_off(sent: bytes, is_closed: bool) -> None:
    with ends() as (here, channel):
        here.sendall(sent)
        if is_closed:
            here.close()
        began = time.monotonic()
        with pytest.raises(EOFError if is_closed else BlockingIOError):
            channel.receive()
        assert time.monotonic() - began < 5.0


def test_an_end_that_reads_nothing_keeps_nobody_waiting_for_ever() -> None:
    with ends() as (_, channel):
        began = time.monotonic()
        with pytest.raises(OSError, match="temporarily unavailable"):
            channel.send("line", "x" * 10_000_000)
        assert time.monotonic() - began < 5.0
        with pytest.raises(BrokenPipeError):  # Half a message was sent.
            channel.send("rank", 1)


def test_a_closed_end() -> None:
    with ends() as (_, channel):
        channel.hang_up()
        for use in (channel.receive, lambda: channel.poll(1.0), lambda: channel.send("rank", 1)):
            with pytest.raises(OSError, match="closed|Bad file descriptor"):
                use()


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


def test_no_object_is_read() -> None:
    with ends() as (here, channel):
        for sent in (pickle.dumps(Bomb()), b"line\n" + pickle.dumps(Bomb())):
            here.sendall(framed(sent))
            with pytest.raises(UnreadableError):
                channel.receive()


def greeted(key: bytes, guest: bytes) -> tuple[Any, Any]:
    """Lets two ends greet each other, which have secrets; returns their errors."""
    here, there = socket.socketpair()
    found: list[Any] = [None, None]
    with Channel(here, SCHEMA) as host, Channel(there, SCHEMA) as other:

        def admit() -> None:
            try:
                host.admit(key)
            except WrongSecretError as error:
                found[0] = error

        thread = threading.Thread(target=admit)
        thread.start()
        try:
            other.enter(guest)
        except WrongSecretError as error:
            found[1] = error
        thread.join(LIMIT)
    return found[0], found[1]


def test_both_ends_learn_whether_the_secret_is_the_same() -> None:
    assert greeted(KEY, KEY) == (None, None)
    assert [type(error) for error in greeted(KEY, OTHER)] == [WrongSecretError] * 2


def test_a_proof_is_of_no_use_to_who_repeats_it() -> None:
    """Neither that of another connection, nor that of the other end."""
    with ends() as (here, channel):
        thread = in_a_thread(channel.enter, KEY)
        here.sendall(framed(_HELLO + b"n" * 32))
        said = here.recv(1 << 10)[4:].removeprefix(_HELLO)
        here.sendall(framed(said[32:]))  # Its own proof.
        thread.join(LIMIT)
    with ends() as (here, channel):
        here.sendall(framed(_HELLO + said))
        with pytest.raises(WrongSecretError):
            channel.admit(KEY)


@pytest.fixture
def reception() -> Iterator[tuple[Reception, tuple[str, int]]]:
    server, _ = listen("", 0, one_machine=True)
    target = server.getsockname()
    with contextlib.closing(Reception(server, KEY, 2, SCHEMA, SCHEMA)) as found:
        yield found, target


def said(reception: Reception, seconds: float = LIMIT) -> list[Any]:
    """Returns what those say who have come."""
    found = []
    for guest in reception.guests(seconds):
        guest.channel.close()
        found.append(guest.said)
    return found


def test_an_old_client_is_told_so_at_once(reception: tuple[Reception, tuple[str, int]]) -> None:
    """One of version 0.3, which authenticates and pickles as Python's multiprocessing does. Others come in meanwhile."""
    began = time.monotonic()
    # Versions of Python name it by other errors.
    with pytest.raises((AssertionError, multiprocessing.AuthenticationError)):
        multiprocessing.connection.Client(reception[1], authkey=KEY)
    assert time.monotonic() - began < 5.0
    with introduced(socket.create_connection(reception[1]), KEY, SCHEMA, 5, "rank", 7):
        assert said(reception[0]) == [7]


def test_who_meets_an_old_host_is_told_so_at_once() -> None:
    with multiprocessing.connection.Listener(("127.0.0.1", 0), authkey=KEY) as old:
        thread = in_a_thread(old.accept)
        with pytest.raises(UnreadableError):
            introduced(socket.create_connection(old.address), KEY, SCHEMA, 5, "rank", 7)
        thread.join(LIMIT)


def test_first_messages_are_short(reception: tuple[Reception, tuple[str, int]]) -> None:
    for text in ("x" * 100_000, "x"):
        with introduced(socket.create_connection(reception[1]), KEY, SCHEMA, 5, "line", text):
            assert said(reception[0], 1.0) == ([] if len(text) > 1 else ["x"])


def test_another_program_at_an_address_of_several(reception: tuple[Reception, tuple[str, int]]) -> None:
    """A name may have two addresses. At one of them something else listens, and at another nothing."""
    port = reception[1][1]
    with socket.create_server(("127.0.0.2", port)) as server:

        def answer() -> None:
            with server.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")

        thread = in_a_thread(answer)
        with connect(["127.0.0.2", "127.0.0.3", "127.0.0.1"], port, KEY, SCHEMA, "rank", 1):
            assert said(reception[0]) == [1]
        thread.join(LIMIT)
