"""A standing meeting: processes stay connected for a whole run, which proceeds in rounds while processes come and go.

Process 0 keeps it. It begins a round when enough processes are present. It makes all of them end the round when one has failed, was
lost, has left or has come. Then it asks its owner whether another round follows.

`Seat` is a process's end of its connection to the meeting.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfrep_strategy.cluster.rendezvous.channel import Channel, Schema, speaking
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.cluster.rendezvous.introductions import (
    STATEMENT,
    Guest,
    Place,
    Reception,
    Statement,
    differing,
    listen_at,
    unusable,
)
from tfrep_strategy.cluster.rendezvous.meeting import LINE_SECONDS, Met, Refusal, given_up
from tfrep_strategy.core.limits import machine_silence
from tfrep_strategy.errors import message

SIGN, SIGN_SECONDS = "sign", 2.0
"""Interval at which both ends of a seat send a sign. The kernel of a machine answers even when its processes are stopped."""
_LOST = "lost", None


class Seat:
    """A process's end of the connection to an `Assembly`.

    Args:
        channel: From `Assembly.begin`, or from `Visit.enter` with `TO_SEATS`.
        on_message: Called, in a thread, with the kind and the content of each message before it enters the inbox. "lost" comes
            last, also when the other end has been silent for too long.

    Attributes:
        inbox: All messages, as (kind, content).
    """

    def __init__(self, channel: Channel, on_message: Callable[[str, Any], None]) -> None:
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._channel, self._on_message = channel, on_message
        self._patience, self._is_over = machine_silence(), threading.Event()
        for target in (self._listen, self._give_signs):
            threading.Thread(target=target, daemon=True, name="tfrep-seat").start()

    def tell(self, kind: str, content: Any = None) -> None:
        """Sends a message. Does nothing if the other end has gone."""
        with contextlib.suppress(OSError):
            self._channel.send(kind, content)

    def _give_signs(self) -> None:
        while not self._is_over.wait(SIGN_SECONDS):
            self.tell(SIGN)

    def _listen(self) -> None:
        try:
            while (heard := self._next()) != _LOST:
                if heard[0] != SIGN:
                    self._on_message(*heard)
                    self.inbox.put(heard)
        finally:
            try:
                self._on_message(*_LOST)
            finally:
                self.inbox.put(_LOST)  # A reader may wait for it without a limit.
                self._is_over.set()
                self._channel.hang_up()

    def _next(self) -> tuple[str, Any]:
        try:
            return self._received()
        except (OSError, EOFError):  # The other end has gone, or has sent something unreadable.
            return _LOST

    def _received(self) -> tuple[str, Any]:
        silent = 0.0
        # Seconds in which this process was stopped are not counted.
        while not self._channel.poll(SIGN_SECONDS):
            silent += SIGN_SECONDS
            if silent > self._patience:
                raise TimeoutError
        kind, content = self._channel.receive()
        return kind, content


_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_GREETING_SECONDS = 10
_LINGER_SECONDS = 3.0
_LAST_CALL_SECONDS = 3.0
"""Seconds without an arrival before a round begins without its full number, or ends for those who have come."""
ANY = -1
"""The number of a process that takes any place."""


@dataclass(frozen=True)
class RoundReport:
    """The end of a round for a process.

    Attributes:
        number: The number of the round.
        outcome: "well", "failed", "told" (it was ordered to end), or "left" (it was asked to end the run).
        story: The events, for the user.
        exit_code: The exit code to report.
        was_lost: Whether a rank was lost, so that another round may end well.
        seconds_ago: Seconds since it failed.
    """

    number: int
    outcome: str
    story: str = ""
    exit_code: int = 0
    was_lost: bool = False
    seconds_ago: float = 0.0


@dataclass(frozen=True)
class RoundEnd:
    """The end of a round.

    Attributes:
        failures: The reports of processes with failed ranks, the first one first.
        lost: Processes that are gone without a report.
        left: Processes that were asked to end.
        has_grown: Whether it was ended because others have come.
        ended_well: Whether all ranks have done their work.
        exit_code: The exit code of a process that was asked to end.
    """

    failures: Sequence[RoundReport]
    lost: Sequence[str]
    left: Sequence[str]
    has_grown: bool
    ended_well: bool
    exit_code: int


@dataclass(frozen=True)
class Verdict:
    """The consequence of the end of a round.

    Attributes:
        again: Whether there is another round.
        text: The message for the users at all processes.
        exit_code: The exit code of the run, if this is its end.
    """

    again: bool
    text: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class RoundStart:
    """The start of a round for a process.

    Attributes:
        number: The number of the round.
        place: The place of this process in it.
        met: All processes of the round.
    """

    number: int
    place: int
    met: list[Met]


_TO_ASSEMBLY = Schema(
    {
        "ready": tuple[dict[str, Any]],
        "report": tuple[RoundReport],
        "leave": tuple[int],
        SIGN: tuple[None],
    }
)
TO_SEATS = Schema(
    {
        "welcome": tuple[dict[str, Any]],
        "round": tuple[RoundStart],
        "again": tuple[str],
        "line": tuple[str],
        "over": tuple[Verdict],
        "error": tuple[Refusal],
        "end": tuple[bool],
        "all": tuple[Any],
        SIGN: tuple[None],
    }
)
"""The messages of an assembly, and "all" from a meeting. "end" tells whether there is haste."""


@dataclass(eq=False)
class _Member:
    """A process that is present."""

    channel: Channel
    statement: Statement
    is_ready: bool = True
    report: RoundReport | None = None
    failed_at: float = 0.0
    silent: float = 0.0

    @property
    def who(self) -> str:
        return f"the machine {self.statement.who}"

    @property
    def order(self) -> float:
        """Its place among the others. Processes without a number come last, in the order of arrival, since sorts are stable."""
        return math.inf if self.statement.number == ANY else self.statement.number

    def send(self, kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # It has ended.
            self.channel.send(kind, content)


class Assembly:
    """Keeps the meeting, in a thread.

    Args:
        place: Where the others come. Its count is the size of a full round.
        least: The number of processes that is enough; None if places are fixed, and each process has its number.
        key: Shared secret.
        seconds: How long to wait for enough processes before each round.
        seconds_to_end: How long processes may take to end a round.
        decide: Called at the end of a round to decide about the next one.

    Raises:
        ConfigurationError: It cannot listen. Its cause is the `OSError`.
    """

    def __init__(
        self,
        place: Place,
        least: int | None,
        key: bytes,
        *,
        seconds: float,
        seconds_to_end: float,
        decide: Callable[[RoundEnd], Verdict],
    ) -> None:
        self._place, self._least, self._seconds, self._decide = place, least, seconds, decide
        self._seconds_to_end = seconds_to_end
        try:
            server, _ = listen_at(place)
        except OSError as error:
            raise unusable(place, error) from error
        self._reception = Reception(server, key, _GREETING_SECONDS, STATEMENT, _TO_ASSEMBLY, place)
        self._members: list[_Member] = []
        self._round: list[_Member] = []
        self._number = -1
        self._lost: list[str] = []
        self._is_growing = False
        self._end_by: float | None = None
        self._last_arrival = time.monotonic()
        self._is_over, self._own_code = False, 1
        self._patience, self._last_look, self._is_closed = machine_silence(), time.monotonic(), threading.Event()
        self._wait_anew()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tfrep-assembly")

    def begin(self, own: Statement) -> Channel:
        """Begins, with process 0 as the first member. Returns its connection."""
        here, there = socket.socketpair()
        self._own = _Member(Channel(here, _TO_ASSEMBLY), own)
        self._members.append(self._own)
        self._thread.start()
        threading.Thread(target=self._give_signs, daemon=True, name="tfrep-assembly").start()
        return Channel(there, TO_SEATS)

    def end(self, seconds: float) -> None:
        """Waits for the end of the run, for some seconds at most."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        with contextlib.closing(self._reception):
            try:
                while not self._is_over:
                    self._look()
            except Exception as error:  # No process may wait forever for this thread.
                _log.exception("The meeting at %s has broken down.", self._place.address)
                what = f"The meeting of the {self._place.noun}s has broken down ({type(error).__name__}: {error})."
                text = message(what, hint="start the run again.", rendezvous=self._place.address)
                self._send_all("error", Refusal(text, lost=True))
        self._is_closed.set()
        self._linger()

    def _give_signs(self) -> None:
        while not self._is_closed.wait(SIGN_SECONDS):
            self._send_all(SIGN, None)

    def _linger(self) -> None:
        """Lets the others hang up first: their last message might be lost with the connection."""
        deadline = time.monotonic() + _LINGER_SECONDS
        here = [member.channel for member in self._members if member is not self._own]
        while here and (left := deadline - time.monotonic()) > 0:
            for channel in speaking(here, left):
                if _LOST in channel.arrived(*_LOST):
                    here.remove(channel)
        for member in self._members:
            member.channel.hang_up()

    def _look(self) -> None:
        for guest in self._reception.guests(_LOOK_SECONDS):
            self._admit(guest)
        speak = speaking([member.channel for member in self._members], 0)
        for member in [member for member in self._members if member.channel in speak]:
            for said in member.channel.arrived(*_LOST):
                if member in self._members:
                    self._hear(member, *said)
        self._lose_the_silent()
        if self._round:
            self._look_at_round()
        elif self._own not in self._members:
            self._finish(self._own_end())
        else:
            self._gather()

    def _admit(self, guest: Guest) -> None:
        member = _Member(guest.channel, guest.said, is_ready=False)
        if problem := self._misfit(member.statement):
            member.send("error", Refusal(problem, lost=False))
            member.channel.hang_up()
            return
        self._members.append(member)
        self._last_arrival = time.monotonic()
        member.send("welcome", self._own.statement.told)  # It answers "ready" if this fits.
        if len(self._round) == self._place.count:
            member.send("line", f"The run has its {self._place.count} {self._place.noun}s. Another one waits until one leaves")

    def _misfit(self, new: Statement) -> str | None:
        """Returns why a process cannot take part. The others continue."""
        own, noun = self._own.statement, self._place.noun
        same = [each.statement.who for each in self._members if new.number == each.statement.number != ANY]
        alike, theirs = own.versions | own.told["alike"], new.told.get("alike")
        new_alike = new.versions | (theirs if isinstance(theirs, dict) else {})
        if name := differing(alike, new_alike):
            what = f"This machine ({new.who}) has {name} {new_alike.get(name)}, and {noun} 0 ({own.who}) has {alike[name]}."
            hint = "start all machines with the same options and versions."
        elif new.number not in (ANY, *range(self._place.count)):
            what = f"{self._place.named([new.number])} is not one of the {self._place.count} {noun}s."
            hint = f"number the {noun}s from 0."
        elif same:
            what = f"Two processes say that they are {noun} {new.number}: {same[0]} and {new.who}."
            hint = f"give each process its own {noun}, and each run its own port."
        else:
            return None
        return message(what, hint=hint, rendezvous=self._place.address)

    def _hear(self, member: _Member, kind: str, content: Any) -> None:
        member.silent = 0.0
        if kind == "ready":
            member.statement, member.is_ready = replace(member.statement, told=content), True
        elif kind == "report" and content.number == self._number:
            member.report = content
            if content.outcome == "told" and self._end_by is None:  # It has lost its connection to this process, and will leave.
                self._lost.append(member.who)
            member.failed_at = time.monotonic() - content.seconds_ago
        elif kind == "leave" or kind == "lost":
            self._own_code = content if member is self._own and kind == "leave" else self._own_code
            self._lose(member)

    def _lose_the_silent(self) -> None:
        now = time.monotonic()
        # If this process was stopped, it cannot know what the others sent meanwhile.
        passed, self._last_look = min(now - self._last_look, SIGN_SECONDS), now
        for member in list(self._members):
            member.silent += passed
            if member.silent > self._patience:
                _log.warning("At %s, %s has said nothing for %.0f seconds.", self._place.address, member.who, member.silent)
                self._lose(member)

    def _lose(self, member: _Member) -> None:
        self._members.remove(member)
        member.channel.hang_up()
        if member in self._round and member.report is None:
            self._lost.append(member.who)

    # Between two rounds.

    def _wait_anew(self) -> None:
        self._deadline = time.monotonic() + self._seconds
        self._next_line = time.monotonic() + LINE_SECONDS

    def _gather(self) -> None:
        now = time.monotonic()
        ready = sorted((each for each in self._members if each.is_ready), key=lambda each: each.order)
        if self._least is None:
            is_enough = len(ready) == self._place.count
        else:
            is_late = now > self._deadline
            is_quiet = is_late or now - self._last_arrival >= _LAST_CALL_SECONDS or len(ready) >= self._place.count
            is_enough = len(ready) >= self._least and is_quiet and (len(ready) == len(self._members) or is_late)
        if is_enough:
            self._begin_round(ready[: self._place.count])
            return
        problem = self._who_is_missing(ready)
        if now > self._deadline:
            text = str(given_up(self._place, self._seconds, problem))
            self._send_all("error", Refusal(text, lost=True))
            self._is_over = True
        elif now > self._next_line:
            self._next_line += LINE_SECONDS
            self._send_all("line", problem)

    def _who_is_missing(self, ready: Sequence[_Member]) -> str:
        if self._least is not None:
            return f"{len(ready)} of at least {self._least} {self._place.noun}s {'is' if len(ready) == 1 else 'are'} here"
        missing = sorted(set(range(self._place.count)) - {each.statement.number for each in ready})
        return f"{self._place.named(missing)} {'has' if len(missing) == 1 else 'have'} not come"

    def _begin_round(self, members: list[_Member]) -> None:
        self._number += 1
        self._round, self._lost, self._is_growing, self._end_by = members, [], False, None
        own_host = self._reception.own_host if len(members) > 1 else LOOPBACK
        statements = [each.statement for each in members]
        met = [Met(own_host if is_loopback(each.host) else each.host, each.told) for each in statements]
        for place, member in enumerate(members):
            member.is_ready, member.report = False, None
            member.send("round", RoundStart(self._number, place, met))

    # During a round.

    def _look_at_round(self) -> None:
        reports = [each.report for each in self._round if each.report is not None]
        awaited = [each for each in self._round if each in self._members and each.report is None]
        if not awaited:
            self._conclude()
        elif self._end_by is None:
            self._is_growing = not reports and self._has_grown()
            # A rank that was asked to end makes all ranks write a backup first.
            failed = any(each.outcome == "failed" and each.exit_code != 143 for each in reports)
            if self._lost or failed:
                self._order(awaited, hasty=True)
            elif self._is_growing or any(each.outcome != "well" for each in reports):
                self._order(awaited, hasty=False)
        elif time.monotonic() > self._end_by:
            for member in awaited:
                self._lose(member)

    def _has_grown(self) -> bool:
        waiting = [each for each in self._members if each.is_ready and each not in self._round]
        is_quiet = time.monotonic() - self._last_arrival >= _LAST_CALL_SECONDS
        return self._least is not None and bool(waiting) and is_quiet and len(self._round) < self._place.count

    def _order(self, members: Sequence[_Member], *, hasty: bool) -> None:
        self._end_by = time.monotonic() + self._seconds_to_end
        for member in members:
            member.send("end", hasty)

    def _conclude(self) -> None:
        reported = [each for each in self._round if each.report is not None]
        in_order = sorted(reported, key=lambda each: each.failed_at)
        reports = [each.report for each in in_order if each.report is not None]
        left = [each for each in reported if each.report is not None and each.report.outcome == "left"]
        ended = RoundEnd(
            failures=[each for each in reports if each.outcome == "failed"],
            lost=self._lost,
            left=[each.who for each in left],
            has_grown=self._is_growing,
            ended_well=not self._lost and all(each.outcome == "well" for each in reports),
            exit_code=next((each.report.exit_code for each in left if each.report is not None), 0),
        )
        verdict = self._decide(ended)
        if self._own not in self._members and not ended.ended_well:
            verdict = self._own_end()
        if not verdict.again:
            self._finish(verdict if ended.ended_well else replace(verdict, exit_code=verdict.exit_code or 1))
            return
        for member in self._members:  # Those that have waited report their free ports again, too.
            member.is_ready = False
            member.send("again", verdict.text)
        self._round = []
        self._wait_anew()

    def _own_end(self) -> Verdict:
        what = "was asked to end" if self._own_code > 128 else "was lost"
        return Verdict(again=False, text=f"{self._place.named([0])} {what}.", exit_code=self._own_code)

    def _finish(self, verdict: Verdict) -> None:
        self._send_all("over", verdict)
        self._is_over = True

    def _send_all(self, kind: str, content: Any) -> None:
        for member in list(self._members):
            member.send(kind, content)
