"""Strangers on this machine send garbage to every port of a run that is starting, and of one that trains. It ends well."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from needs import needs_horovod
from test_open_doors import KINDS, LIMIT, READY, TFREP, WAITS, running, wait_for

from tfrep_strategy.rendezvous.connections import free_ports

MEETING = [
    *TFREP, "run", "--nnodes", "1:2", "--rendezvous", "MEETING_PLACE", "-n", "2",
    "--communicator", "tf", "--backup-dir", "backups", WAITS, "FOLDER",
]  # fmt: skip
"""Its launcher waits for others as long as it runs."""

MANY = 1000
"""How many connections each port gets at once, while the run starts and while it trains."""


class Exploit:
    """Its pickle makes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._file), "w")


def garbage(file: Path) -> list[bytes]:
    exploit = pickle.dumps(Exploit(file))
    put = f"PUT /global/0 HTTP/1.1\r\nContent-Length: {len(exploit)}\r\n\r\n".encode() + exploit
    framed = [struct.pack("!i", len(each)) + each for each in (b"x" * 16, b"#CHALLENGE#" + b"x" * 20, exploit)]
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(100)
    return [b"", os.urandom(1000), b"GET / HTTP/1.1\r\n\r\n", put, exploit, http2, b"\xff" * 100, *framed]


def ports_of(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found |= {port.laddr.port for port in each.net_connections("tcp") if port.status == psutil.CONN_LISTEN}
    return found


def send(stack: contextlib.ExitStack, port: int, content: bytes) -> None:
    """Leaves the connection open, as one half of whoever sends garbage does."""
    with contextlib.suppress(ConnectionError, TimeoutError):  # Of the other side, and no limit of this one.
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1.0))
        connection.sendall(content)


def attack(stack: contextlib.ExitStack, port: int, contents: list[bytes]) -> None:
    """Sends each content, and says nothing over many connections more."""
    for content in [*contents, *[b""] * MANY]:
        send(stack, port, content)


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """This process may have as many connections as it wants; those that it has started keep their limit."""
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, most))


@pytest.mark.parametrize("kind", ["tf", pytest.param("horovod", marks=needs_horovod), "servers", "meeting"])
def test_garbage_on_every_port(kind: str, tmp_path: Path) -> None:
    loaded, sent, starting = tmp_path / "loaded", garbage(tmp_path / "loaded"), set[int]()
    places = {"FOLDER": str(tmp_path), "MEETING_PLACE": f"127.0.0.1:{free_ports(1)[0]}"}
    command = [places.get(each, each) for each in KINDS.get(kind, MEETING)]
    with contextlib.ExitStack() as stack, running([sys.executable, *command], tmp_path) as process:
        stack.enter_context(many_files())

        def is_ready() -> bool:
            for port in ports_of(process.pid) - starting if kind != "horovod" else ():
                starting.add(port)
                attack(stack, port, sent)
            return len(list(tmp_path.glob("ready*"))) == READY.get(kind, 2)

        wait_for(is_ready, process)
        ports = ports_of(process.pid)
        for port in ports:
            attack(stack, port, sent)
        (tmp_path / "go").touch()
        output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    assert ports
    assert not loaded.exists()
