"""Keeps strangers from a port before the server that will listen there can be confined, and afterwards if it cannot be."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence

from tfrep_strategy.rendezvous.packet_filter import TAKES_CONNECTIONS, attach
from tfrep_strategy.validation import Network

_SHARES_PORT = "TF_GRPC_REUSE_PORT"
"""Has TensorFlow's server listen at a port at which a socket of the same user listens."""


_kept: list[contextlib.ExitStack] = []
"""Holds what keeps ports shut until the process ends."""


class Shutter:
    """A socket that keeps strangers from a port.

    Args:
        descriptor: Of the socket.

    Attributes:
        stays: Whether it keeps the port shut until the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.stays = descriptor, False


@contextlib.contextmanager
def shut(port: int, networks: Sequence[Network]) -> Iterator[Shutter | None]:
    """Keeps strangers from a port while the body runs, in which TensorFlow starts a server there.

    A socket of this process listens there first, and takes nothing. The kernel asks a program of this socket who gets a connection:
    it, or for some networks TensorFlow's server. Who comes before that one listens is not answered, or hung up, and tries again by
    itself.

    Args:
        port: The port.
        networks: Whose addresses are no strangers'.

    Yields:
        What shuts it; None if the port cannot be shut, or is in use, of which TensorFlow will tell.

    Example:
        >>> with shut(0, []) as shutter:
        ...     shutter is None
        False
    """
    with contextlib.ExitStack() as stack:
        try:
            shutter = Shutter(stack.enter_context(_listening(port, networks)).fileno())
        except OSError:
            yield None
            return
        before = os.environ.get(_SHARES_PORT)
        os.environ[_SHARES_PORT] = "1"
        try:
            yield shutter
        finally:
            if before is None:
                del os.environ[_SHARES_PORT]
            else:
                os.environ[_SHARES_PORT] = before
            if shutter.stays:
                _kept.append(stack.pop_all())


@contextlib.contextmanager
def _listening(port: int, networks: Sequence[Network]) -> Iterator[socket.socket]:
    """Yields a socket that takes nothing.

    Raises:
        OSError: The port is in use, or the system has no such programs.
    """
    with socket.socket(_family(), socket.SOCK_STREAM) as first:
        first.settimeout(None)  # Whatever the script has set for new sockets.
        if first.family == socket.AF_INET6:
            first.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("", port))  # Shares it with nobody who is there.
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        attach(first, networks, TAKES_CONNECTIONS)
        try:
            attach(first, [])
        except PermissionError:  # Since Linux commit 5d39580f68e6 only administrators may filter what comes to a TCP socket.
            threading.Thread(target=_hang_up, args=(first,), daemon=True, name="tfrep-shutter").start()
        first.listen()
        try:
            yield first
        finally:
            first.shutdown(socket.SHUT_RDWR)  # Wakes the thread.


def _hang_up(server: socket.socket) -> None:
    """Closes each connection at once, until the socket is closed."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def _family() -> socket.AddressFamily:
    """Returns the family of addresses that TensorFlow chooses: its sockets must be of the same one to share a port."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return socket.AF_INET6
    return socket.AF_INET
