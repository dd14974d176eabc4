"""A seat at a standing meeting: what a process says there, and what it is told."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tfrep_strategy.limits import machine_silence
from tfrep_strategy.rendezvous.connections import hang_up, set_patience

SIGN, SIGN_SECONDS = "sign", 2.0
"""What both ends of a seat say that often. The kernel of a machine answers also when its processes stand still."""
_LONGEST_ANSWER = 1 << 26
_LOST = "lost", None


class Seat:
    """The end of the connection to an `Assembly` that a process has.

    Args:
        connection: From `Assembly.begin`, or from `Visit.enter`.
        told: Is called, in a thread, with the kind and the content of all that comes, before anybody reads it. "lost" comes last,
            also when the other end has been silent for too long.

    Attributes:
        inbox: All that has come, as (kind, content).
    """

    def __init__(self, connection: Connection, told: Callable[[str, Any], None]) -> None:
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._connection, self._told = connection, told
        self._patience, self._sending, self._is_over = machine_silence(), threading.Lock(), threading.Event()
        set_patience(connection, 0)
        for target in (self._listen, self._give_signs):
            threading.Thread(target=target, daemon=True, name="tfrep-seat").start()

    def tell(self, kind: str, content: Any = None) -> None:
        """Says something; nothing happens if nobody is there any more."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send_bytes(json.dumps([kind, content]).encode())

    def _give_signs(self) -> None:
        while not self._is_over.wait(SIGN_SECONDS):
            self.tell(SIGN)

    def _listen(self) -> None:
        try:
            while (heard := self._next()) != _LOST:
                if heard[0] != SIGN:
                    self._told(*heard)
                    self.inbox.put(heard)
        finally:
            try:
                self._told(*_LOST)
            finally:
                self.inbox.put(_LOST)  # Somebody may wait for it without a limit.
                self._is_over.set()
                hang_up(self._connection, self._sending)

    def _next(self) -> tuple[str, Any]:
        try:
            return self._received()
        except (OSError, EOFError, ValueError, TypeError):  # The other end has gone, or says what nobody understands.
            return _LOST

    def _received(self) -> tuple[str, Any]:
        silent = 0.0
        # Seconds in which this process stood still are not counted.
        while not self._connection.poll(SIGN_SECONDS):
            silent += SIGN_SECONDS
            if silent > self._patience:
                raise TimeoutError
        kind, content = json.loads(self._connection.recv_bytes(_LONGEST_ANSWER))
        return kind, content
