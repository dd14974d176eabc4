"""Rank 0's server, through which ranks report failures and collectives. It runs in a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfrep_strategy.cluster.flight_recorder import Hang, Whereabouts, folder_of_hangs, hang_of
from tfrep_strategy.cluster.rendezvous.channel import CONNECT_SECONDS, GREETING_SECONDS, Channel, write
from tfrep_strategy.cluster.rendezvous.connections import close_in_children
from tfrep_strategy.cluster.rendezvous.introductions import Reception, listen
from tfrep_strategy.communicators.peers import reports
from tfrep_strategy.communicators.peers.reports import SAME_CALLS, Report, describe_difference, some_of
from tfrep_strategy.core.limits import longest_silence, timeout_seconds
from tfrep_strategy.errors import message

_END_SECONDS = 5
_LOOK_SECONDS = 0.2
_STATE_SECONDS = 30.0
_GATHER_SECONDS = 1.0
"""How long the hub waits for the reports of the other ranks once two reports differ."""


def state_seconds(limit: float) -> float:
    """Returns the time between two reports of a rank's state to the hub.

    Args:
        limit: The longest time that a rank may keep others waiting.

    Example:
        >>> state_seconds(10.0), state_seconds(math.inf)
        (2.5, 30.0)
    """
    return min(limit / 4, _STATE_SECONDS)


class Hub:
    """Tells all ranks when one ends, and compares the collectives that they are about to call.

    Args:
        size: Number of ranks.
        loopback: Whether all ranks are on this machine.
        silence_seconds: The time that a rank may keep others waiting in a collective before it is reported.
        host: Address of this machine for the other ranks. Default: unknown; the hub then listens on all interfaces.
        lend: Called with each rank's connection. The watcher of this process uses it to report why it kills the process.

    Attributes:
        port: The port that it listens on until all ranks have connected.
        key: Shared secret of the ranks.
    """

    def __init__(
        self,
        size: int,
        loopback: bool,
        silence_seconds: float,
        host: str = "",
        lend: Callable[[Channel], None] = lambda channel: None,
    ) -> None:
        self._size, self._silence, self._lend = size, silence_seconds, lend
        self.key = secrets.token_bytes(32)
        self._server, _ = listen(host, 0, one_machine=loopback)
        self.port: int = self._server.getsockname()[1]
        self._is_given_up = False
        self._ranks: dict[Channel, int] = {}
        self._selector = selectors.DefaultSelector()
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._goodbyes: list[tuple[Any, ...]] = []  # Ends that were not yet reported to the others, as `EndedRank` takes them.
        self._rounds: dict[tuple[Sequence[int], Any], _Round] = {}
        self._last: dict[int, Report] = {}
        self._idle_since: dict[int, float | None] = {}
        self._busy_since: dict[int, float | None] = {}
        self._heard: dict[int, float] = {}
        self._silent: dict[int, float] = {}
        self._looked_for_silence = 0.0
        self._programs = reports.Programs(self._tell)
        self._has_told_hang = False
        self._where: dict[int, Whereabouts | None] = {}
        self._inquiries: list[_Inquiry] = []
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
            self._selector.close()
            for channel in self._ranks:
                channel.hang_up()

    def _accept(self) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS + GREETING_SECONDS
        missing = set(range(self._size))
        reception = Reception(self._server, self.key, GREETING_SECONDS, reports.RANK, reports.TO_HUB)
        with contextlib.closing(reception):
            while missing and time.monotonic() < deadline and not self._is_given_up:
                for guest in reception.guests(_LOOK_SECONDS):
                    if guest.said not in missing:  # It has come before, or is no rank.
                        guest.channel.hang_up()
                        continue
                    missing.remove(guest.said)
                    self._ranks[guest.channel] = guest.said
                    self._selector.register(guest.channel, selectors.EVENT_READ)
                    self._lend(guest.channel)

    def _serve(self) -> None:
        self._heard = dict.fromkeys(self._ranks.values(), time.monotonic())
        while self._ranks and 0 not in self._ended:
            ready = self._ready(self._patience())
            # All of them first: if this process was held up, ranks that spoke meanwhile were not silent.
            self._heard |= dict.fromkeys((self._ranks[channel] for channel in ready), time.monotonic())
            self._hear_all(ready)
            self._judge()
            self._conclude()
        while self._ranks and (ready := self._ready(0)):  # Reads messages that others sent before rank 0 left.
            self._hear_all(ready)

    def _ready(self, seconds: float | None) -> list[Channel]:
        return [key.fileobj for key, _ in self._selector.select(seconds)]  # type: ignore[misc]

    def _hear_all(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            for said in channel.arrived("ended", True, None):
                if channel in self._ranks:  # The last word of a rank may not be the last message.
                    self._hear(channel, said)
        self._say_goodbyes()

    def _say_goodbyes(self) -> None:
        if self._goodbyes:  # In one message, because all ranks say goodbye at the end of a run.
            self._tell(("ended", self._goodbyes))
            self._goodbyes = []

    def _hear(self, channel: Channel, said: tuple[Any, ...]) -> None:
        rank = self._ranks[channel]
        if said[0] == "report":
            self._note(rank, said[1])
        elif said[0] in reports.OF_HUB:
            self._programs.hear(rank, *said)
        elif said[0] == "state":
            self._weigh(channel, *said[1:])
        elif said[0] == "where":
            self._where[rank] = said[1]
            for each in self._inquiries:
                each.missing.discard(rank)
        elif said[0] == "late":
            self._inquire(self._tell_hang if said[1] else self._tell_lag)
        else:
            frozen = said[0] == "frozen"
            if frozen:  # The rank's watcher reports it, and kills the rank.
                self._where[rank] = said[3] or self._where.get(rank)
                said = "ended", True, said[2]
            _, lost, error = said
            del self._ranks[channel]
            self._ended.add(rank)
            self._programs.forget(rank)
            self._idle_since.pop(rank, None)
            self._busy_since.pop(rank, None)
            self._failed |= {rank} if lost or error is not None else set()
            for each in self._inquiries:
                each.missing.discard(rank)
            if frozen:
                self._inquire(lambda: self._tell_frozen(rank, error))
            else:
                self._goodbyes.append((rank, lost, error))
            self._selector.unregister(channel)
            channel.hang_up()

    def _tell(self, news: Any, group: Sequence[int] | None = None) -> None:
        data = write(*news)
        for channel, rank in self._ranks.items():
            if group is None or rank in group:
                with contextlib.suppress(OSError):  # The connection is broken; the next read reports it.
                    channel.send_written(data)

    def _weigh(self, channel: Channel, busy: float | None, idle: float, where: Whereabouts | None = None) -> None:
        """Answers with the silent ranks. Reports a hang if one rank waits in a call and another calls nothing beyond the limit."""
        now = time.monotonic()
        self._look_for_silence(now)
        with contextlib.suppress(OSError):  # As in `_tell`.
            channel.send("silent", self._silent)
        rank = self._ranks[channel]
        self._where[rank] = where
        self._idle_since[rank] = None if busy is not None else now - idle
        self._busy_since[rank] = None if busy is None else now - busy
        if busy is None or busy <= self._limit:
            return
        if self._has_told_hang:
            return
        is_silent = any(silence > self._longest_silence for silence in self._silent.values())
        if is_silent or any(since is not None and now - since > self._limit for since in self._idle_since.values()):
            self._inquire(self._tell_hang)

    def _look_for_silence(self, now: float) -> None:
        """Finds silent ranks. Each rank asks, so this is done less often than ranks ask."""
        if now - self._looked_for_silence < state_seconds(self._limit) / 10:
            return
        self._looked_for_silence = now
        silences = {rank: now - heard for rank, heard in self._heard.items() if rank not in self._ended}
        self._silent = {rank: silence for rank, silence in silences.items() if silence > 3 * state_seconds(self._limit)}

    # Where the ranks are.

    def _inquire(self, then: Callable[[], None]) -> None:
        """Asks all ranks where they are, and then calls a function. Equal questions are asked once."""
        if all(each.then != then for each in self._inquiries):
            self._inquiries.append(_Inquiry(set(self._ranks.values()) - set(self._silent), then))
            self._tell(("where",))

    def _conclude(self) -> None:
        now = time.monotonic()
        for each in [each for each in self._inquiries if not each.missing or now > each.deadline]:
            self._inquiries.remove(each)
            for rank in each.missing - self._ended:
                self._silent.setdefault(rank, now - self._heard[rank])
            each.then()
        self._say_goodbyes()

    def _hang(self, what: str, seen: Mapping[int, str]) -> Hang:
        silent = dict(seen)
        for rank, silence in sorted(self._silent.items(), key=lambda each: -each[1]):
            silent.setdefault(rank, f"has said nothing for {silence:.0f} s")
        for rank in sorted(self._ended):
            silent.setdefault(rank, "has ended")
        return hang_of(what, {rank: self._where.get(rank) for rank in range(self._size)}, silent)

    def _tell_lag(self) -> None:
        """Reports a rank that does not come to a collective in a function. A collective in which all ranks are may take long."""
        if self._hang("", {}).lags is not None:
            self._tell_hang()

    def _tell_hang(self) -> None:
        if self._has_told_hang:
            return
        self._has_told_hang = True
        now, hang = time.monotonic(), self._hang("", {})
        if hang.lags in self._silent:
            what = f"Rank {hang.lags} has said nothing for {self._silent[hang.lags]:.0f} seconds, and others wait."
        elif (since := self._idle_since.get(hang.lags if hang.lags is not None else -1)) is not None:
            what = f"Rank {hang.lags} has called no collective for {now - since:.0f} seconds, and others wait."
        elif hang.lags is not None:
            what = f"Rank {hang.lags} did not come to a collective within {self._limit:.0f} seconds."
        else:
            what = f"A collective has not finished within {self._limit:.0f} seconds."
        hang = dataclasses.replace(hang, what=what)
        hang.write(folder_of_hangs())
        self._tell(("hang", [what, *hang.lines()]))

    def _tell_frozen(self, rank: int, seen: str) -> None:
        hang = self._hang(f"Rank {rank} {seen}.", {rank: seen})
        hang.write(folder_of_hangs())
        self._goodbyes.append((rank, True, seen, hang.lines()))

    # Collectives that ranks are about to call.

    def _note(self, rank: int, report: Report) -> None:
        self._last[rank] = report
        if isinstance(report.number, tuple):
            self._forget_before(report.group, report.number)
        current = self._rounds.setdefault((report.group, report.number), _Round(report, self._silence))
        current.reports[rank] = report
        current.missing.discard(rank)
        if report.is_limited and not current.is_limited:
            current.is_limited, current.deadline = True, time.monotonic() + _GATHER_SECONDS
        first = next(iter(current.reports.values()))
        if not report.call.fits(first.call) and not current.differs:
            current.differs = True
            current.deadline = time.monotonic() + _GATHER_SECONDS

    def _forget_before(self, group: Sequence[int], number: tuple[int, str, int]) -> None:
        """Forgets earlier reports of a collective in a function, once a rank has begun the same collective again."""
        for key in list(self._rounds):
            if key[0] == group and isinstance(key[1], tuple) and key[1][:2] == number[:2] and key[1][2] < number[2]:
                del self._rounds[key]

    def _judge(self) -> None:
        now = time.monotonic()
        for key, current in list(self._rounds.items()):
            group, number = key
            missing = current.missing
            if not missing and not current.differs:
                if not current.waits:
                    continue  # A rank may report again that it has been there for long.
                self._tell(("agreed", key), group)
            elif current.differs and not missing and current.waits:  # No rank has begun. All get the error and can continue.
                what = self._describe("Ranks called different collectives.", group, current)
                self._tell(("refused", key, what), group)
            elif current.differs and current.is_due() and (not missing or now > current.deadline):
                self._tell(("desync", self._describe("Ranks called different collectives.", group, current)))
            elif not missing.isdisjoint(self._failed):
                pass  # The waiting ranks already know of the rank that failed.
            elif current.is_limited and (now > current.deadline or not missing.isdisjoint(self._ended)):
                what = f"Only some of the ranks {some_of(group)} called "
                if isinstance(number, int):
                    what += f"their collective number {number + 1}."
                elif all(map(self._is_in_a_call, missing)):
                    what += f"a collective in which others have waited for {self._limit:.0f} seconds."
                else:  # `_weigh` reports ranks that call nothing or are silent.
                    current.deadline = now + _GATHER_SECONDS
                    continue
                self._inquire(functools.partial(self._tell_missing, what, frozenset(missing)))
            else:
                continue
            del self._rounds[key]

    def _describe(self, what: str, group: Sequence[int], current: _Round) -> str:
        words = []
        for rank in group:
            if rank in current.reports:
                words.append((rank, str(current.reports[rank].call)))
            else:
                words.append((rank, self._missed(rank, current)))
        return describe_difference(what, words)

    def _tell_missing(self, what: str, missing: frozenset[int]) -> None:
        """Reports ranks that did not come to a collective in time."""
        hang = self._hang(what, {})
        hang.write(folder_of_hangs())
        self._tell(("desync", message("\n".join([what, *hang.lines()]), hint=SAME_CALLS, code="TFREP-E019")))

    def _is_in_a_call(self, rank: int) -> bool:
        """Returns whether a rank waits in a call. A rank that was silent until now has yet to report its state."""
        since = self._busy_since.get(rank)
        return rank not in self._silent and since is not None and time.monotonic() - since > self._limit / 2

    def _missed(self, rank: int, current: _Round) -> str:
        """Describes a rank's state outside the collective."""
        waited, last = time.monotonic() - current.began, self._last.get(rank)
        if last is not None and not last.waits and rank not in self._ended:
            return f"not there; it has last waited in {last.call}"
        word = "has ended" if rank in self._ended else f"nothing for {waited:.0f} seconds"
        return word + (f"; before that {last.call}" if last else "")

    def _patience(self) -> float | None:
        deadlines = [each.deadline for each in self._rounds.values() if each.is_due()]
        deadlines += [each.deadline for each in self._inquiries]
        return max(0.0, min(deadlines) - time.monotonic()) + 0.01 if deadlines else None

    def _leave_to_parent(self) -> None:
        self._server.close()
        for channel in self._ranks:
            channel.close()


class _Inquiry:
    """A question to all ranks where they are.

    Args:
        missing: The ranks that have not answered.
        then: Called when all have, or the deadline is over.
    """

    def __init__(self, missing: set[int], then: Callable[[], None]) -> None:
        self.missing, self.then = missing, then
        self.deadline = time.monotonic() + _GATHER_SECONDS


class _Round:
    """The reports of all ranks about one collective."""

    def __init__(self, first: Report, silence: float) -> None:
        self.reports: dict[int, Report] = {}
        self.missing = set(first.group)
        self.waits, self.is_limited, self.differs = first.waits, first.is_limited, False
        self.began = time.monotonic()
        self.deadline = self.began + silence

    def is_due(self) -> bool:
        """Returns whether the deadline applies. Ranks without a time limit wait until all have reported."""
        return self.is_limited or (self.differs and not self.waits)
