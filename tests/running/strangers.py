"""What strangers send to ports. As a program, on a machine of its own: `strangers.py FILE HOST PORT SOURCE...`."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

MANY = 1000
"""How many connections say nothing, on each port."""


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


def send(stack: contextlib.ExitStack, host: str, port: int, content: bytes, source: str) -> bool:
    """Leaves the connection open, as one half of whoever sends garbage does. Returns whether it came through."""
    with contextlib.suppress(ConnectionError, TimeoutError):  # Of the other side, and no limit of this one.
        connection = stack.enter_context(socket.create_connection((host, port), 1.0, (source, 0)))
        connection.sendall(content)
        return True
    return False


def attack(stack: contextlib.ExitStack, port: int, contents: Sequence[bytes], host: str = "127.0.0.1", source: str = "") -> None:
    """Sends each content, and says nothing over many connections more."""
    for content in [*contents, *[b""] * MANY]:
        if not send(stack, host, port, content, source) and source:
            break  # Its packets are dropped, and each attempt would take a second.


@contextlib.contextmanager
def flood(ports: Collection[int]) -> Iterator[None]:
    """Connects to the ports again and again while the body runs, and keeps the last connections open."""
    is_over = threading.Event()

    def connect() -> None:
        opened = deque[contextlib.ExitStack]()
        for port in itertools.cycle(ports):
            if is_over.is_set():
                break
            opened.append(contextlib.ExitStack())
            send(opened[-1], "127.0.0.1", port, b"", "")
            if len(opened) > MANY:
                opened.popleft().close()
        for each in opened:
            each.close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """This process may have as many connections as it wants; those that it has started keep their limit."""
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, most))


def main(file: str, host: str, port: str, *sources: str) -> None:
    """Attacks, says so, and keeps all connections open until its input ends."""
    with contextlib.ExitStack() as stack, many_files():
        for source in sources:
            attack(stack, int(port), garbage(Path(file)), host, source)
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
