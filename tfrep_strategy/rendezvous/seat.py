"""A seat at a standing meeting: what a process says there, and what it is told."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tfrep_strategy.rendezvous.connections import set_patience

_LONGEST_ANSWER = 1 << 26


class Seat:
    """The end of the connection to an `Assembly` that a process has.

    Args:
        connection: From `Assembly.begin`, or from `Visit.enter`.
        told: Is called, in a thread, with the kind and the content of all that comes, before anybody reads it. "lost" comes last.

    Attributes:
        inbox: All that has come, as (kind, content).
    """

    def __init__(self, connection: Connection, told: Callable[[str, Any], None]) -> None:
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._connection, self._told = connection, told
        set_patience(connection, 0)
        threading.Thread(target=self._listen, daemon=True, name="tfrep-seat").start()

    def tell(self, kind: str, content: Any = None) -> None:
        """Says something; nothing happens if nobody is there any more."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps([kind, content]).encode())

    def _listen(self) -> None:
        kind = ""
        while kind != "lost":
            try:
                kind, content = json.loads(self._connection.recv_bytes(_LONGEST_ANSWER))
            except (OSError, EOFError):
                kind, content = "lost", None
            self._told(kind, content)
            self.inbox.put((kind, content))
