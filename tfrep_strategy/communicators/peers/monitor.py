"""Watches the other ranks: names the rank that has ended when a collective fails, or aborts one that would wait forever."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.flight_recorder import RECORDER, hang_of
from tfrep_strategy.cluster.rendezvous.channel import Channel, connect
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, close_in_children, is_number, own_hosts
from tfrep_strategy.communicators.base import Communicator
from tfrep_strategy.communicators.peers import reports
from tfrep_strategy.communicators.peers.hub import Hub, state_seconds
from tfrep_strategy.communicators.peers.position import Followed, Position
from tfrep_strategy.communicators.peers.reports import Report
from tfrep_strategy.core.calls import Call
from tfrep_strategy.core.limits import is_debugging, timeout_seconds
from tfrep_strategy.errors import DesyncError, PeerError, message


class PeerLostError(PeerError, tf.errors.UnavailableError):
    """A rank has ended while this one needed it. It is also a `tf.errors.UnavailableError`."""

    def __init__(self, text: str) -> None:
        tf.errors.UnavailableError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return PeerLostError, (self.message,)


class EndedRank:
    """A rank that has ended.

    Args:
        rank: The rank.
        lost: Whether its connection broke without a goodbye: the process was killed, or called `os._exit`.
        error: The error that ended it, if any. For a lost rank: the observation of its watcher before it killed the rank.
        hang: If its watcher killed it: where each rank was, in lines.
    """

    def __init__(self, rank: int, lost: bool, error: str | None, hang: Sequence[str] = ()) -> None:
        self.rank, self.lost, self.error, self.hang = rank, lost, error, hang
        self.when = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether it ended before the end of its program."""
        return self.lost or self.error is not None

    @property
    def how(self) -> str:
        """The reason, worded to follow "ended"."""
        if self.lost:
            return f", killed by its watcher: it {self.error}" if self.error else " without a word"
        return f" with {self.error}" if self.error else ""

    def __str__(self) -> str:
        return f"Rank {self.rank} ended {time.monotonic() - self.when:.1f} seconds ago{self.how.rstrip('.')}."


def peer_lost_error(ended: EndedRank) -> PeerLostError:
    """Makes the error of a process that needs a rank that has ended."""
    hint = f"look for the reason in the output of rank {ended.rank}"
    hint += "; the system may have killed it because memory ran out." if ended.lost else "."
    if ended.lost and ended.error:
        hint = "find out who has stopped it, or what it was doing; TFREP_TIMEOUT=0 lets ranks wait, as under a debugger."
    if not ended.failed:
        hint = "every rank has to call the same collectives; its program ended before that of the others."
    what = "\n".join([f"{ended} No collective can finish without it.", *ended.hang])
    return PeerLostError(message(what, hint=hint, code="TFREP-E018"))


def one_line(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its text, shortened."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= 200 else text[:200] + "..."


class WatchedCall:
    """One collective, or a body of several.

    Args:
        group: The ranks that take part.
        single: Whether it is one collective.
        others: The running calls, in the order in which they began.

    Attributes:
        began: When it began.
        waits_since: The time when it began, or when the last call inside it ended.
    """

    def __init__(self, group: Sequence[int], single: bool, others: Sequence[WatchedCall]) -> None:
        self.group, self.single = group, single
        self.began = self.waits_since = time.monotonic()
        self._thread = threading.get_ident()
        self._outer = next((call for call in reversed(others) if call._thread == self._thread), None)
        self._seen: weakref.ref[Exception] | None = None

    @property
    def is_outermost(self) -> bool:
        """Whether no other call encloses it."""
        return self._outer is None

    def end(self) -> None:
        """Records its end."""
        if self._outer is not None:
            self._outer.waits_since = time.monotonic()

    def is_seen(self, error: Exception) -> bool:
        """Returns whether an enclosed call has seen an error before, and records that this one has."""
        is_seen = self._seen is not None and self._seen() is error
        if self._outer is not None:
            self._outer._seen = weakref.ref(error)
        return is_seen


def innermost(calls: Sequence[WatchedCall]) -> list[WatchedCall]:
    """Returns the calls that enclose no other call; each thread has one."""
    return list({call._thread: call for call in calls}.values())


def missing(group: Sequence[int], ended: Sequence[EndedRank]) -> list[EndedRank]:
    """Returns the ended ranks that a group needs, failed ones first.

    All ranks need every failed rank, and rank 0, which has the hub.
    """
    needed = [each for each in ended if each.failed or each.rank in group or each.rank == 0]
    return sorted(needed, key=lambda each: not each.failed)


_log = logging.getLogger(__name__)

_LOST_SECONDS = 0.5
_LEFT_SECONDS = 5.0
"""The time that a call may continue after a rank ended without an error: data from it may still arrive."""
_NEWS_SECONDS = 2.0
_TICK_SECONDS = 0.1
_LOOK_SECONDS = 0.7
"""The time between two looks of a rank at its position."""
_END_SECONDS = 5.0
_SILENCE_SECONDS = 25.0
_HANG_HINT = (
    "find out what the rank that lags is doing. `tfrep doctor --hang FOLDER` shows this again, for the folder of the logs."
    " A slow network needs a longer limit."
)
_ABORTS, _ABORT_SECONDS = 3, 4.0
"""The number of aborts, and the seconds between them, before the process is ended."""

# Errors that a lost rank can cause on this one. Others have local causes.
_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnknownError,
)


class PeerMonitor:
    """Connects this rank with the hub, which tells it when other ranks end.

    Args:
        channel: The connection to the hub.
        communicator: The communicator whose collectives are aborted when they would wait forever.
        hub: The hub on rank 0; None on other ranks.
        checks_every_call: Whether ranks also compare collectives in functions before they run.
        watcher: Watches this process from outside; ends with the monitor.

    Attributes:
        ended: The ranks that have ended, in the order in which they ended.
        refused_in_function: The error of a collective that was refused while a function ran.
    """

    def __init__(
        self,
        channel: Channel,
        communicator: Communicator,
        hub: Hub | None,
        checks_every_call: bool,
        watcher: Any = None,
    ) -> None:
        self.rank, self.size, self.checks_every_call = communicator.rank, communicator.size, checks_every_call
        self.ended: list[EndedRank] = []
        self._desync: str | None = None
        self._hang: str | None = None
        self._channel, self._hub, self._abort, self._watcher = channel, hub, communicator.abort, watcher
        self._news = threading.Condition()
        self._numbers: collections.Counter[Sequence[int]] = collections.Counter()
        self._agreed: set[Any] = set()
        self._refused: dict[Any, str] = {}
        self.refused_in_function: Exception | None = None
        self._calls: list[WatchedCall] = []
        self._idle_since = self._told_state = time.monotonic()
        self._limit = timeout_seconds()
        self._silent: dict[int, float] = {}
        self._asked: float | None = None  # When the hub was asked for a report, since this rank waits too long.
        self._answered = time.monotonic()
        self._followed: list[Followed] = []
        self._aborting: threading.Thread | None = None
        self._closing = False
        close_in_children(self, PeerMonitor._leave_to_parent)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="tfrep-monitor")
        self.programs = reports.OwnPrograms(self._send, self._news, lambda: self._desync, self._thread.is_alive, self._limit)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        communicator: Communicator,
        hosts: Sequence[str] = (),
        silence_seconds: float = _SILENCE_SECONDS,
        watch: Callable[[int], Any] = lambda rank: None,
    ) -> PeerMonitor | None:
        """Connects all ranks. Every rank must call it.

        Args:
            communicator: Sends the hub's address and the key to all ranks.
            hosts: The machine of each rank, as far as known.
            silence_seconds: With `TFREP_DEBUG=1`, the time that a rank may keep others waiting in a collective.
            watch: Starts the watcher of this rank, if it needs one; see `cluster/watcher.py`.

        Returns:
            The monitor; None, with a warning, if some rank cannot reach rank 0.

        Example:
            >>> monitor = PeerMonitor.start(tfrep.communicators.SingleCommunicator())
            >>> monitor.ended
            []
            >>> monitor.close()
        """
        loopback = communicator.local_size == communicator.size
        # A host name may resolve to another address on other ranks.
        host = hosts[0].strip("[]") if hosts and is_number(hosts[0]) else ""
        watcher = watch(communicator.rank)
        lend = watcher.lend if watcher else lambda channel: None
        hub = Hub(communicator.size, loopback, silence_seconds, host, lend) if communicator.rank == 0 else None
        own = (own_hosts(loopback, hosts), hub.port, hub.key) if hub else None
        addresses, port, key = communicator.broadcast_object(own)
        if communicator.rank == 0:
            addresses = [LOOPBACK, host] if host else [LOOPBACK]
        channel = connect(addresses, port, key, reports.TO_RANKS, "rank", communicator.rank)
        own_answer = tf.constant([[int(channel is not None), int(is_debugging())]])
        answers = communicator.all_gather_equal(own_answer).numpy()
        unreachable = [rank for rank, (reached, _) in enumerate(answers.tolist()) if not reached]
        if channel is not None and not unreachable:
            if hub is None:
                lend(channel)
            return cls(channel, communicator, hub, bool(answers[:, 1].any()), watcher)
        if watcher:
            watcher.close()
        if channel is not None:
            channel.close()
        if hub is not None:
            hub.stop_listening()
            _log.warning(
                "Ranks %s cannot reach rank 0 (%s, any port). The end of a rank will be noticed late.",
                unreachable, ", ".join(addresses))  # fmt: skip
        return None

    # Methods for callers of collectives.

    @contextlib.contextmanager
    def watching(self, group: Sequence[int], single: bool = False) -> Iterator[None]:
        """Aborts the collectives inside if they would wait forever, and raises an error that names the rank.

        Args:
            group: The ranks that take part. Other ranks may end meanwhile without an error.
            single: Whether the body is one collective, to which the time limit applies. A body of several collectives may
                take long. It is aborted if it waits while another rank calls nothing for the time limit.

        Raises:
            PeerLostError: A rank has ended. It replaces the error of TensorFlow or Horovod.
            DesyncError: The ranks called different collectives.
            PeerError: The time limit, `TFREP_TIMEOUT`, was reached, although no rank has ended.
        """
        call = WatchedCall(group, single, list(self._calls))
        if call.is_outermost:
            self.refused_in_function = None
            if not single:
                RECORDER.calls, RECORDER.in_call = RECORDER.calls + 1, True
        self._calls.append(call)
        try:
            yield
        except (PeerLostError, DesyncError):
            raise
        except _FAILURES as error:
            explained, self.refused_in_function = self.refused_in_function, None
            explained = explained or (None if call.is_seen(error) else self._explain(call))
            if explained is None:
                raise
            raise explained from error
        finally:
            self._calls.remove(call)
            call.end()
            if call.is_outermost and not single:
                RECORDER.in_call = False
            self._idle_since = time.monotonic()

    def check(self, group: Sequence[int]) -> None:
        """Raises unless the ranks of a group can still call collectives together.

        Raises:
            PeerLostError: A rank that the group needs has ended.
            DesyncError: The ranks called different collectives before.
            PeerError: The other ranks have waited too long for one.
        """
        if self._desync:
            raise DesyncError(self._desync)
        if self._hang:
            raise PeerError(self._hang)
        if ended := missing(group, self.ended):
            raise peer_lost_error(ended[0])

    def report(self, group: Sequence[int], call: Call) -> None:
        """Reports the next collective of this rank, and waits until the other ranks have reported the same.

        Args:
            group: The ranks that take part, from `group_of`.
            call: The collective.

        Raises:
            DesyncError: The ranks reported different ones. If all ranks of the group got this error, they can continue.
            PeerLostError: A rank ended meanwhile.
            PeerError: The other ranks called nothing within the time limit, `TFREP_TIMEOUT`.
        """
        self.check(())
        number = self._numbers[group]
        self._numbers[group] += 1
        key, began = (group, number), time.monotonic()

        def heard() -> bool:
            now = time.monotonic()
            left = any(each.failed or now - each.when > _LEFT_SECONDS for each in missing(group, self.ended))
            is_answered = key in self._agreed or key in self._refused or bool(self._desync or self._hang)
            return is_answered or left or now - began > self._limit or not self._thread.is_alive()

        self._send(("report", Report(group, number, call, True, self.checks_every_call)))
        with self._news:
            while not self._news.wait_for(heard, 1.0):
                pass
            if key in self._agreed:
                self._agreed.remove(key)
                return
            if key in self._refused:
                raise DesyncError(self._refused.pop(key))
        self.check(group)
        if time.monotonic() - began > self._limit:
            raise self._given_up(time.monotonic() - began)

    def refuse_in_function(self, error: Exception) -> None:
        """Records the error of a collective that was refused in a running function, because TensorFlow replaces the error."""
        self.refused_in_function = error

    def follow(self, group: Sequence[int], position: Position) -> None:
        """Reports collectives in functions, once this rank has been in them for some time.

        Ranks in the same collective with different tensors, or in different collectives, wait forever. Rank 0 finds them by
        these reports: the former at once, the latter when the time limit, `TFREP_TIMEOUT`, is reached.

        Args:
            group: The ranks that take part.
            position: The position of this rank. All ranks of the group follow their positions in the same order.
        """
        if any(each.position is position for each in self._followed):  # A group that was made twice.
            return
        number = sum(each.group == group for each in self._followed)
        self._followed.append(Followed(group, number, position, self._limit))
        RECORDER.places.append(self._followed[-1].known)

    def close(self) -> None:
        """Reports the end of this rank to the others. Only ranks that still need it get an error."""
        if self._closing:
            return
        self._closing = True
        for each in self._followed:
            RECORDER.places.remove(each.known)
        atexit.unregister(self.close)
        error = getattr(sys, "last_value", None)
        self._send(("ended", False, None if error is None else one_line(error)))
        self._thread.join(_END_SECONDS)
        if self._hub is not None:
            self._hub.join()
        if self._aborting is not None:
            self._aborting.join(_END_SECONDS)
        if self._watcher is not None:
            self._watcher.close()

    # Methods for the monitor's thread.

    def _listen(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._channel.hang_up)
            while True:
                try:
                    pause = _TICK_SECONDS if self.ended else state_seconds(self._limit)
                    if not self._channel.poll(min(pause, _LOOK_SECONDS) if self._followed else pause):
                        self._tell_state()
                        self._look()
                        self._consider_abort()
                        continue
                    news = self._channel.receive()
                except (EOFError, OSError):
                    break
                with self._news:
                    self._hear(*news)
                    self._news.notify_all()
            with self._news:
                if not self._closing and all(each.rank != 0 for each in self.ended):
                    self._hear("ended", [(0, True, None)])
                self._news.notify_all()
            while not self._closing and not self._consider_abort():
                time.sleep(_TICK_SECONDS)

    def _hear(self, kind: str, *what: Any) -> None:
        if kind == "agreed":
            self._agreed.add(what[0])
        elif kind == "refused":
            self._refused[what[0]] = what[1]
        elif kind == "desync":
            if self._desync is None:
                self._desync = what[0]
                _log.error(self._desync)
                RECORDER.write(self.rank)
            self._start_abort(self._desync)
        elif kind == "where":
            self._look()
            self._send(("where", RECORDER.whereabouts()))
        elif kind in reports.OF_RANK:
            self.programs.hear(kind, *what)
        elif kind == "silent":
            self._silent, self._answered = what[0], time.monotonic()
        elif kind == "hang" and self._hang is None:
            self._hang = message("\n".join(what[0]), hint=_HANG_HINT, code="TFREP-E017", TFREP_TIMEOUT=self._limit)
            _log.error(self._hang)
            RECORDER.write(self.rank)
            self._start_abort(self._hang)
        elif kind == "frozen":  # The watcher of rank 0 reports it, and kills rank 0. No hub can ask the others where they are.
            rank, seen, where = what
            hang = hang_of(f"Rank {rank} {seen}.", {rank: where, self.rank: RECORDER.whereabouts()}, {rank: seen})
            self._hear("ended", [(rank, True, seen, hang.lines())])
        elif kind == "ended":
            is_first = not any(each.failed for each in self.ended)
            ended = [EndedRank(*each) for each in what[0]]
            self.ended += ended
            failed = [each for each in ended if each.failed]
            if failed and is_first and not self._closing:
                _log.error("Rank %d ended%s. The other ranks cannot go on without it.", failed[0].rank, failed[0].how)
                if failed[0].hang:
                    RECORDER.write(self.rank)

    def _consider_abort(self) -> bool:
        """Aborts the collectives if they certainly cannot finish; returns whether they were aborted."""
        if self._aborting is not None or self._closing:
            return True
        now = time.monotonic()
        failed = [each for each in self.ended if each.failed]
        if failed and now - failed[0].when > _LOST_SECONDS:
            self._start_abort(str(failed[0]))
            return True
        calls = list(self._calls)
        for call in innermost(calls):
            for ended in missing(call.group, self.ended):
                if now - max(call.waits_since, ended.when) > _LEFT_SECONDS:
                    self._start_abort(str(ended))
        is_late = any(call.single and now - call.began > self._limit for call in calls)
        if is_late or (calls and RECORDER.longest() > self._limit):
            if self._asked is None:
                self._asked = now
                self._send(("late", is_late))
            elif is_late and now - self._asked > _NEWS_SECONDS:  # The hub does not answer.
                self._start_abort(f"A collective has not finished within {self._limit:.0f} seconds.")
        else:
            self._asked = None
        return self._aborting is not None

    def _tell_state(self) -> None:
        """Reports to the hub how long this rank has been in a call, or how long ago its last call ended."""
        now = time.monotonic()
        if now - self._told_state < state_seconds(self._limit):
            return
        self._told_state = now
        where = RECORDER.whereabouts()
        # A function that no context watches may be in a collective, too.
        busy = [now - call.began for call in list(self._calls)] + [each.seconds or 0.0 for each in where.now]
        self._send(("state", max(busy, default=None), now - self._idle_since, where))

    def _look(self) -> None:
        """Reports the collectives in functions in which this rank is stuck."""
        for followed in list(self._followed) if not self._closing and not self._aborting else []:
            for report in followed.look():
                self._send(("report", report))

    def _start_abort(self, reason: str) -> None:
        if self._aborting is None and not self._closing:
            # Uses a separate thread, because it may take long and this thread must keep reading messages.
            self._aborting = threading.Thread(target=self._end_calls, args=(reason,), daemon=True, name="tfrep-abort")
            self._aborting.start()

    def _end_calls(self, reason: str) -> None:
        """Aborts collectives. If the running calls do not end, it ends the process."""
        under_way = set(self._calls)
        for _ in range(_ABORTS):
            self._abort(reason)
            deadline = time.monotonic() + _ABORT_SECONDS
            while time.monotonic() < deadline:
                if self._closing or not under_way & set(self._calls):
                    return
                time.sleep(_TICK_SECONDS)
        _log.critical("%s A running collective could not be aborted, so this process ends now.", reason)
        os._exit(1)

    def _explain(self, call: WatchedCall) -> Exception | None:
        waited = time.monotonic() - call.began
        with self._news:
            self._news.wait_for(lambda: bool(self._desync or self._hang or missing(call.group, self.ended)), _NEWS_SECONDS)
        if self._desync:
            return DesyncError(self._desync)
        if self._hang:
            return PeerError(self._hang)
        if ended := missing(call.group, self.ended):
            return peer_lost_error(ended[0])
        if waited < 0.9 * self._limit:
            return None
        return self._given_up(waited)

    def _given_up(self, waited: float) -> PeerError:
        """Makes the error of a collective that was given up. The hub tells where the ranks are, unless rank 0 is silent."""
        self._send(("late", True))
        with self._news:
            self._news.wait_for(lambda: bool(self._desync or self._hang or not self._thread.is_alive()), _NEWS_SECONDS)
        if self._desync or self._hang:
            return DesyncError(self._desync) if self._desync else PeerError(self._hang)
        RECORDER.write(self.rank)
        hint = "TFREP_DEBUG=1 shows which rank does not call it; TFREP_TIMEOUT sets the limit. A slow network needs more."
        what = "A collective was given up, since not all ranks have called it."
        silence = time.monotonic() - self._answered
        silent = {0: silence} if silence > 3 * state_seconds(self._limit) else self._silent
        for rank, seconds in silent.items():
            what += f" Rank {rank} has said nothing for {seconds:.0f} seconds."
        return PeerError(message(what, hint=hint, code="TFREP-E017", waited_seconds=round(waited)))

    def _send(self, said: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(*said)

    def _leave_to_parent(self) -> None:
        self._closing = True
        atexit.unregister(self.close)
        self._channel.close()
