"""Greets those that connect, all at once, so that a stranger who says nothing keeps nobody waiting."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from tfrep_strategy.rendezvous.connections import connection_of, duplicate, prove

_MOST_AT_ONCE = 256
"""How many are greeted at once. When more come, they wait until one has been greeted."""
_TURN_SECONDS = 1.0
"""After how long those that are greeted have to go, if none of them has been greeted meanwhile and others wait."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Guest:
    """Somebody who has connected.

    Attributes:
        connection: The connection. If it has another secret, it is closed.
        address: Its address.
        reached: Address of this machine at which it came.
        said: What it said after the proof; None if it has another secret.
    """

    connection: Connection
    address: str
    reached: str
    said: Any = None


class Reception:
    """Lets each that connects prove that it knows the secret, and hears what it says first, each in a thread of its own.

    Args:
        server: Where they connect. The reception closes it.
        key: Shared secret.
        seconds: How long each may take.
        hear: Reads what it says first. Whoever says what this cannot read is a stranger.
    """

    def __init__(self, server: socket.socket, key: bytes, seconds: int, hear: Callable[[Connection], Any]) -> None:
        self._server, self._key, self._seconds, self._hear = server, key, seconds, hear
        self._guests: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self._deadlines: dict[Connection, float] = {}  # Of those that are being greeted, in the order in which they came.
        self._lock = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="tfrep-reception")
        self._thread.start()

    def guests(self, seconds: float) -> list[Guest]:
        """Returns those that have been greeted since the last call.

        Args:
            seconds: How long to wait if there is none.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._guests.get(timeout=seconds))
            while True:
                found.append(self._guests.get_nowait())
        return found

    def close(self) -> None:
        """Closes the server, and the connections to those that have not been taken."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # Wakes the thread.
        self._thread.join()
        self._server.close()
        self._give_up(math.inf)
        for guest in self.guests(0.0):
            guest.connection.close()

    def _accept(self) -> None:
        self._server.settimeout(_LOOK_SECONDS)
        while not self._is_closed:
            with contextlib.suppress(OSError):  # Nobody came, or one came and left.
                self._begin(*self._server.accept())
            self._give_up(time.monotonic())

    def _begin(self, peer: socket.socket, address: Any) -> None:
        reached = peer.getsockname()[0].removeprefix("::ffff:")
        connection = connection_of(peer, self._seconds)
        with self._lock:
            while len(self._deadlines) == _MOST_AT_ONCE and not self._is_closed:
                if not self._lock.wait(_TURN_SECONDS):
                    for silent in self._deadlines:
                        _hang_up(silent)
                    self._deadlines.clear()
            self._deadlines[connection] = time.monotonic() + self._seconds
        guest = Guest(connection, address[0], reached)
        threading.Thread(target=self._greet, args=(guest,), daemon=True, name="tfrep-greeting").start()

    def _give_up(self, now: float) -> None:
        with self._lock:
            for connection, deadline in self._deadlines.items():
                if now > deadline:
                    _hang_up(connection)

    def _greet(self, guest: Guest) -> None:
        connection = guest.connection
        greeted = None
        try:
            prove(connection, self._key, listens=True)
            greeted = Guest(connection, guest.address, guest.reached, self._hear(connection))
        except AuthenticationError:
            greeted = guest
        except Exception:  # Another program may connect and send anything.
            pass
        with self._lock:
            self._deadlines.pop(connection, None)
            self._lock.notify_all()
            if greeted is None or greeted is guest or self._is_closed:
                connection.close()
            if greeted is not None and not self._is_closed:
                self._guests.put(greeted)


def _hang_up(connection: Connection) -> None:
    """Ends a read of another thread from a connection."""
    with contextlib.suppress(OSError), duplicate(connection.fileno()) as own:
        own.shutdown(socket.SHUT_RDWR)
