"""How ranks that know each other's addresses from the start (`TF_CONFIG`) wait for each other, in real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from calling import command
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import tf_config
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, free_ports
from tfrep_strategy.cluster.rendezvous.meeting import meet_at
from tfrep_strategy.errors import ConfigurationError, PeerError

_LIMIT_OF_TENSORFLOW = 25.0
_LIMIT = 150
_GARBAGE = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04cos\nsystem\n.", os.urandom(4096)]

pytestmark = [pytest.mark.lane("faults"), pytest.mark.timeout(300)]


def comes(after: str) -> None:
    time.sleep(float(after))
    before = time.monotonic()
    try:
        strategy = tfrep.MultiWorkerStrategy("tf")
    except (ConfigurationError, PeerError) as error:
        print(json.dumps({"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - before}), flush=True)
        os._exit(0)
    print(json.dumps(sorted(strategy.extended.all_gather_object(strategy.rank))))


@contextmanager
def started(rank: int, addresses: list[str], after: float = 0.0, **environ: str) -> Iterator[subprocess.Popen[str]]:
    variables = tf_config(addresses, rank)
    process = subprocess.Popen(
        command(comes, str(after)),
        env={**os.environ, **variables, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> tuple[Any, str]:
    out, err = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def free_addresses(count: int) -> list[str]:
    return [f"{LOOPBACK}:{port}" for port in free_ports(count)]


def connected(address: str, process: subprocess.Popen[str]) -> socket.socket:
    """Connects as soon as a process listens."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens: {process.stderr.read() if process.stderr else ''}")


@pytest.mark.parametrize(("rank", "named"), [*in_lane("short", (0, "Rank 1 has not come.")), (1, "Rank 0 cannot be reached")])
def test_the_limit_of_a_meeting(rank: int, named: str) -> None:
    with started(rank, free_addresses(2), TFREP_RENDEZVOUS_TIMEOUT="2") as alone:
        told, _ = said(alone)
    assert told["kind"] == "PeerError"
    assert "Not all ranks came to the rendezvous within 2 seconds." in told["text"]
    assert named in told["text"]
    assert "Hint: " in told["text"]
    assert "TFREP_RENDEZVOUS_TIMEOUT" in told["text"]
    assert 2 <= told["seconds"] < 20


def test_a_process_comes_late() -> None:
    addresses = free_addresses(2)
    with started(0, addresses) as first, started(1, addresses, after=_LIMIT_OF_TENSORFLOW + 5) as late:
        (told, err), (other, _) = said(first), said(late)
    assert told == other == [0, 1]
    assert f"Waiting at {addresses[0]}. Rank 1 has not come" in err


@pytest.mark.lane("short")
def test_strangers_come_first() -> None:
    """They say nothing, or garbage, at the port of rank 0. One has another list of addresses."""
    addresses = free_addresses(3)
    with ExitStack() as stack:
        first = stack.enter_context(started(0, addresses[:2]))
        for sent in _GARBAGE:
            stranger = stack.enter_context(connected(addresses[0], first))
            stranger.sendall(sent)
        told, _ = said(stack.enter_context(started(1, addresses)))
        assert told["kind"] == "ConfigurationError"
        assert "The list of addresses of this process is not that of rank 0." in told["text"]
        assert "TF_CONFIG" in told["text"]
        second = stack.enter_context(started(1, addresses[:2]))
        (told, err), (other, _) = said(first), said(second)
    assert told == other == [0, 1]
    assert "has another list of addresses, and is refused" in err


def test_another_program_has_the_address_of_this_process() -> None:
    with socket.create_server((LOOPBACK, 0)) as program:
        port = program.getsockname()[1]
        addresses = [f"{LOOPBACK}:{port}", *free_addresses(1)]
        with started(0, addresses) as process:
            told, _ = said(process)
    assert told["kind"] == "ConfigurationError"
    assert "This process cannot listen on its own address (Address already in use)." in told["text"]
    assert f"the program that has port {port} of this machine" in told["text"]
    assert told["seconds"] < 20


def test_a_rank_ends_between_the_meeting_and_the_start_of_tensorflow() -> None:
    """TensorFlow would hold Python's lock, and wait for ever."""
    addresses = free_addresses(2)
    with started(0, addresses) as first:
        meet_at(addresses, 1, "TF_CONFIG")
        told, _ = said(first)
    assert told["kind"] == "PeerError"
    assert "TensorFlow's runtime could not connect the 2 processes." in told["text"]
    assert _LIMIT_OF_TENSORFLOW <= told["seconds"] < 3 * _LIMIT_OF_TENSORFLOW


def test_the_address_of_another_rank_is_wrong() -> None:
    """Rank 1 listens at this port, but the address is one for documents."""
    addresses = [*free_addresses(1), f"192.0.2.1:{free_ports(1)[0]}"]
    with started(0, addresses) as first, started(1, addresses):
        told, _ = said(first)
    assert told["kind"] == "PeerError"
    assert "No process answers at the address of rank 1" in told["text"]
    assert addresses[1] in told["text"]
