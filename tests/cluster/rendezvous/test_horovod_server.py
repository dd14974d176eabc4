"""Horovod's rendezvous server hears only who shows the secret, and is kept waiting by nobody."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from needs import needs_horovod

from tfrep_strategy.cluster.horovod.gloo import _MOST_AT_ONCE, served, slots_of
from tfrep_strategy.running.ranks import deferred_signals
from tfrep_strategy.running.runs import Options, run_to_end

pytestmark = [pytest.mark.lane("quick"), needs_horovod]

LOOPBACK = "127.0.0.1"
SHOWN = {"Authorization": "Bearer sesame"}


@pytest.fixture
def port() -> Iterator[int]:
    with served(slots_of(["localhost"] * 2), LOOPBACK, 0, (), "sesame") as port:
        yield port


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(LOOPBACK, port, timeout=20)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_ranks_leave_and_find_their_addresses(port: int) -> None:
    assert ask(port, "GET", "/global_/0", **SHOWN)[0] == 404
    assert ask(port, "PUT", "/global_/0", b"address", **SHOWN)[0] == 200
    assert ask(port, "GET", "/global_/0", **SHOWN) == (200, b"address")
    assert ask(port, "DELETE", "/global_/0", **SHOWN)[0] == 200
    assert ask(port, "GET", "/global_/0", **SHOWN)[0] == 404


@pytest.mark.parametrize("shown", [{}, {"Authorization": "Bearer open"}, {"Authorization": "Bearer \xff"}])
def test_a_stranger_reads_and_writes_nothing(port: int, shown: dict[str, str]) -> None:
    ask(port, "PUT", "/global_/0", b"address", **SHOWN)
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        assert ask(port, method, "/global_/0", b"other", **shown)[0] == 401
    assert ask(port, "GET", "/global_/0", **SHOWN) == (200, b"address")


def test_a_horovod_that_shows_no_secret() -> None:
    with served(slots_of(["localhost"]), LOOPBACK, 0, (), "") as port:
        assert ask(port, "PUT", "/global_/0", b"address")[0] == 200
        assert ask(port, "GET", "/global_/0") == (200, b"address")


def test_silent_strangers_keep_nobody_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(served(slots_of(["localhost"]), LOOPBACK, 0, (), "sesame"))
        strangers = [stack.enter_context(socket.create_connection((LOOPBACK, port))) for _ in range(3 * _MOST_AT_ONCE)]
        begun = time.monotonic()
        assert ask(port, "PUT", "/global_/0", b"address", **SHOWN)[0] == 200
        assert threading.active_count() - threads < 2 * _MOST_AT_ONCE  # Those who came first are gone.
        for each in strangers[-9:]:
            each.sendall(b"\xff\r\n" * 5)
        for each in strangers[-5:]:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # Cuts the connection.
            each.close()
        assert ask(port, "GET", "/global_/0", **SHOWN) == (200, b"address")
    assert time.monotonic() - begun < 2.5  # Before the server would give up one that is silent.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("version", "warnings"), [("0.28.1", 1), ("0.28.1+tfrep", 0)])
def test_a_horovod_that_asks_for_no_secret_is_named_once(
    version: str, warnings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the run is started again."""
    monkeypatch.setattr("tfrep_strategy.cluster.horovod.gloo.horovod_version", lambda: version)
    program = "import os, signal\nif os.environ['TFREP_RESTARTS'] == '0': os.kill(os.getpid(), signal.SIGKILL)"
    options = Options(2, communicator="horovod", log_dir=tmp_path / "logs", max_restarts=1)
    with deferred_signals() as events:
        run_to_end(options, [sys.executable, "-c", program], tmp_path, events)
    assert caplog.text.count("this Horovod has no secret. Received: horovod='0.28.1'\nHint: build") == warnings
