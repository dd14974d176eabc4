"""Rank 0's server, through which ranks report failures and collectives. It runs in a thread."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tfrep_strategy.communicators.forking import close_in_children
from tfrep_strategy.communicators.peers.reports import Report, describe_difference
from tfrep_strategy.limits import longest_silence, timeout_seconds
from tfrep_strategy.rendezvous.connections import CONNECT_SECONDS, set_patience
from tfrep_strategy.rendezvous.listening import listen
from tfrep_strategy.rendezvous.reception import Reception

_END_SECONDS = 5
_LOOK_SECONDS = 0.2
_STATE_SECONDS = 30.0
_GATHER_SECONDS = 1.0
"""How long the hub waits for the reports of the other ranks once two reports differ."""


def state_seconds(limit: float) -> float:
    """Returns how often a rank tells its state to the hub.

    Args:
        limit: How long a rank may keep others waiting.

    Example:
        >>> state_seconds(10.0), state_seconds(math.inf)
        (2.5, 30.0)
    """
    return min(limit / 4, _STATE_SECONDS)


class Hub:
    """Tells all ranks when one ends, and compares the collectives that they are about to call.

    Args:
        size: How many ranks there are.
        loopback: Whether all of them are on this machine.
        silence_seconds: How long a rank may keep others waiting in a collective before it is reported.
        host: Address of this machine, as the other ranks reach it. Default: not known; it then listens on all interfaces.

    Attributes:
        port: The port that it listens on until all ranks have connected.
        key: Shared secret of the ranks.
    """

    def __init__(self, size: int, loopback: bool, silence_seconds: float, host: str = "") -> None:
        self._size, self._silence = size, silence_seconds
        self.key = secrets.token_bytes(32)
        self._server, _ = listen(host, 0, one_machine=loopback)
        self.port: int = self._server.getsockname()[1]
        self._is_given_up = False
        self._ranks: dict[Connection, int] = {}
        self._ended: dict[int, bool] = {}  # Whether each ended rank failed.
        self._rounds: dict[tuple[tuple[int, ...], Any], _Round] = {}
        self._last: dict[int, Report] = {}
        self._idle_since: dict[int, float | None] = {}
        self._heard: dict[int, float] = {}
        self._limit = timeout_seconds()
        self._longest_silence = max(self._limit, longest_silence())
        close_in_children(self, Hub._leave_to_parent)
        self._thread = threading.Thread(target=self._run, daemon=True, name="tfrep-hub")
        self._thread.start()

    def join(self) -> None:
        """Waits until the hub has ended. It ends when rank 0 has said goodbye."""
        self._thread.join(_END_SECONDS)

    def stop_listening(self) -> None:
        """Stops waiting for ranks that have not connected."""
        self._is_given_up = True

    def _run(self) -> None:
        try:
            self._accept()
            self._serve()
        finally:
            for connection in self._ranks:
                connection.close()

    def _accept(self) -> None:
        deadline = time.monotonic() + 2 * CONNECT_SECONDS
        with contextlib.closing(Reception(self._server, self.key, int(CONNECT_SECONDS), Connection.recv)) as reception:
            while len(self._ranks) < self._size and time.monotonic() < deadline and not self._is_given_up:
                for guest in reception.guests(_LOOK_SECONDS):
                    if guest.said is not None:
                        set_patience(guest.connection, 0)
                        self._ranks[guest.connection] = guest.said

    def _serve(self) -> None:
        self._heard = dict.fromkeys(self._ranks.values(), time.monotonic())
        while self._ranks and 0 not in self._ended:
            ready = wait(list(self._ranks), self._patience())
            # All of them first: if this process was held up, none of those that spoke meanwhile was silent.
            self._heard |= {self._ranks[connection]: time.monotonic() for connection in ready}  # type: ignore[index]
            for connection in ready:
                self._hear(connection)  # type: ignore[arg-type]
            self._judge()
        while ready := wait(list(self._ranks), 0):  # Reads messages that others sent before rank 0 left.
            for connection in ready:
                self._hear(connection)  # type: ignore[arg-type]

    def _hear(self, connection: Connection) -> None:
        rank = self._ranks[connection]
        try:
            said = connection.recv()
        except (EOFError, OSError):
            said = "ended", True, None
        if isinstance(said, Report):
            self._note(rank, said)
        elif said[0] == "state":
            self._weigh(rank, *said[1:])
        else:
            _, lost, error = said
            del self._ranks[connection]
            self._ended[rank] = lost or error is not None
            self._tell(("ended", rank, lost, error))
            connection.close()

    def _tell(self, news: Any, group: Sequence[int] | None = None) -> None:
        for connection, rank in list(self._ranks.items()):
            if group is None or rank in group:
                with contextlib.suppress(OSError):  # The connection is broken; the next read reports it.
                    connection.send(news)

    def _weigh(self, rank: int, busy: float | None, idle: float) -> None:
        """Answers who is silent. Reports a hang: one rank waits in a call and another calls nothing, both longer than the limit."""
        now = time.monotonic()
        silences = {other: now - heard for other, heard in self._heard.items() if other not in self._ended}
        silent = {other: silence for other, silence in silences.items() if silence > 3 * state_seconds(self._limit)}
        self._tell(("silent", silent), [rank])
        for other, silence in silent.items():
            if busy is not None and busy > self._limit and silence > self._longest_silence:
                self._tell(("hang", other, silence, "said nothing"))
        self._idle_since[rank] = None if busy is not None else now - idle
        for other, since in self._idle_since.items():
            if busy is not None and busy > self._limit and since is not None and now - since > self._limit:
                self._tell(("hang", other, now - since, "called no collective"))

    # Collectives that ranks are about to call.

    def _note(self, rank: int, report: Report) -> None:
        self._last[rank] = report
        if isinstance(report.number, tuple):
            self._forget_before(report.group, report.number)
        current = self._rounds.setdefault((report.group, report.number), _Round(report, self._silence))
        current.reports[rank] = report
        first = next(iter(current.reports.values()))
        if not report.call.fits(first.call) and not current.differs:
            current.differs = True
            current.deadline = time.monotonic() + _GATHER_SECONDS

    def _forget_before(self, group: tuple[int, ...], number: tuple[int, str, int]) -> None:
        """Forgets earlier reports of a collective in a function, once a rank has begun the same collective again."""
        for key in list(self._rounds):
            if key[0] == group and isinstance(key[1], tuple) and key[1][:2] == number[:2] and key[1][2] < number[2]:
                del self._rounds[key]

    def _judge(self) -> None:
        now = time.monotonic()
        for key, current in list(self._rounds.items()):
            group, number = key
            missing = [rank for rank in group if rank not in current.reports]
            if not missing and not current.differs:
                if current.waits:
                    self._tell(("agreed", key), group)
            elif current.differs and not missing and current.waits:  # No rank has begun; all get the error and can go on.
                what = self._describe("Ranks called different collectives.", group, current)
                self._tell(("refused", key, what), group)
            elif current.differs and current.is_due() and (not missing or now > current.deadline):
                self._tell(("desync", self._describe("Ranks called different collectives.", group, current)))
            elif any(self._ended.get(rank) for rank in missing):
                pass  # The waiting ranks already know of the rank that failed.
            elif current.is_limited and (now > current.deadline or not self._ended.keys().isdisjoint(missing)):
                what = f"Only some of the ranks {list(group)} called their collective number {int(number) + 1}."
                self._tell(("desync", self._describe(what, group, current)))
            else:
                continue
            del self._rounds[key]

    def _describe(self, what: str, group: tuple[int, ...], current: _Round) -> str:
        words = []
        for rank in group:
            if rank in current.reports:
                words.append((rank, str(current.reports[rank].call)))
            else:
                waited = time.monotonic() - current.began
                word = "has ended" if rank in self._ended else f"nothing for {waited:.0f} seconds"
                last = self._last.get(rank)
                words.append((rank, word + (f"; before that {last.call}" if last else "")))
        return describe_difference(what, words)

    def _patience(self) -> float | None:
        deadlines = [each.deadline for each in self._rounds.values() if each.is_due()]
        return max(0.0, min(deadlines) - time.monotonic()) + 0.01 if deadlines else None

    def _leave_to_parent(self) -> None:
        self._server.close()
        for connection in self._ranks:
            connection.close()


class _Round:
    """The reports of all ranks about one collective."""

    def __init__(self, first: Report, silence: float) -> None:
        self.reports: dict[int, Report] = {}
        self.waits, self.is_limited, self.differs = first.waits, first.is_limited, False
        self.began = time.monotonic()
        self.deadline = self.began + silence

    def is_due(self) -> bool:
        """Returns whether the deadline applies. Ranks that wait without a limit wait until all have reported."""
        return self.is_limited or (self.differs and not self.waits)
