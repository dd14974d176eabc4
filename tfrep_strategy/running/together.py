"""Launchers on several machines that stay together: after a loss, or when a machine comes or goes, they start all ranks again.

The launcher of machine 0 keeps the standing meeting, and decides what the end of a round means.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tfrep_strategy.cluster.identity import common_hash_seed
from tfrep_strategy.cluster.rendezvous.assembly import ANY, TO_SEATS, Assembly, RoundEnd, RoundReport, RoundStart, Seat, Verdict
from tfrep_strategy.cluster.rendezvous.channel import Channel
from tfrep_strategy.cluster.rendezvous.confinement import is_this_machine
from tfrep_strategy.cluster.rendezvous.introductions import Statement
from tfrep_strategy.cluster.rendezvous.meeting import Visit, shared_secret
from tfrep_strategy.core.limits import grace_seconds, meeting_seconds
from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.nodes import Nodes, told_by
from tfrep_strategy.running.ranks import GRACE_SECONDS, Events, Failure
from tfrep_strategy.running.runs import Options, Restarts, Round, where_it_goes_on
from tfrep_strategy.running.shared_folder import SharedFolder, check_reached, is_address, marked, shared_folder

_log = logging.getLogger(__name__)

_END_SECONDS = 30.0
"""How long a launcher may take to end a round, beside the grace of its ranks."""


@contextlib.contextmanager
def together(options: Options) -> Iterator[Launcher]:
    """Joins the launchers of the other machines, for as long as the body runs.

    Args:
        options: What kind of run is wanted, with a node and a folder for backups.

    Yields:
        This launcher among them.

    Raises:
        ConfigurationError: The options do not fit those of the others, or this machine cannot listen.
        PeerError: Machine 0 did not answer in time.

    Example:
        >>> with together(options) as launcher, deferred_signals() as events:  # doctest: +SKIP
        ...     run_ranks_of_script(["script", "train.py"], launcher.options, events, launcher.rounds(events))
    """
    node = options.node
    assert node is not None
    assert options.backup_dir is not None
    folder = shared_folder(options.backup_dir)
    key = shared_secret(node.place.one_machine)
    assembly = None
    if node.rank == 0 or (node.rank is None and is_this_machine(node.place.target[0])):
        seconds_to_end = grace_seconds(for_a_backup=True) + _END_SECONDS
        judge = _Judge(options, folder)
        try:
            assembly = Assembly(
                replace(node.place, number=0), node.least, key,
                seconds=meeting_seconds(), seconds_to_end=seconds_to_end, decide=judge.decide,
            )  # fmt: skip
        except ConfigurationError as error:
            if node.rank == 0 or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            # Machine 0 is another launcher on this machine.
        else:
            judge.forget_steps()
    with contextlib.ExitStack() as stack:
        mark = stack.enter_context(marked(folder)) if assembly else None
        launcher = Launcher(options, folder, mark, assembly)
        place = replace(node.place, number=0 if assembly else ANY if node.is_elastic else node.place.number)
        statement = Statement.of(place, launcher.told())
        if assembly is not None:
            launcher.take(assembly.begin(statement))
        else:
            launcher.visit(Visit(place, statement, key, meeting_seconds()))
        stack.callback(launcher.leave, 1)
        yield launcher


class Launcher:
    """The launcher of this machine among those of a run.

    Args:
        options: What kind of run is wanted.
        folder: For backups.
        mark: What this machine has left in the folder for backups, if it is machine 0.
        assembly: What it keeps, if it is machine 0.
    """

    def __init__(self, options: Options, folder: SharedFolder, mark: str | None, assembly: Assembly | None) -> None:
        assert options.node is not None
        self.options, self._node, self._folder = options, options.node, folder
        self._mark, self._assembly = mark, assembly
        self._visit: Visit | None = None
        self._last: Round | None = None
        self._hash_seed = common_hash_seed()
        self._events: Events = queue.SimpleQueue()
        self._signals: list[int] = []

    def take(self, channel: Channel) -> None:
        """Takes its seat at the meeting."""
        self._seat = Seat(channel, self._hear)

    def visit(self, visit: Visit) -> None:
        """Goes to machine 0, and takes its seat there."""
        self._visit = visit
        self.take(visit.insist(lambda: visit.enter(TO_SEATS)))

    def leave(self, exit_code: int) -> None:
        """Leaves the others, which is no loss if the run is over. At machine 0 this waits for the end of the run."""
        self._seat.tell("leave", exit_code)
        if self._assembly is not None:
            self._assembly.end(grace_seconds(for_a_backup=True) + 2 * _END_SECONDS)

    def told(self) -> dict[str, Any]:
        """Returns what the others must know of this machine in the next round."""
        options = self.options
        told = told_by(self._node, options.size, options.resolved_communicator, self._hash_seed, self._mark)
        least = self._node.least
        nnodes = self._node.count if least is None else f"{least}:{self._node.count}"
        alike = {"--nnodes": nnodes, "communicator": told["communicator"], "--max-restarts": options.max_restarts}
        if is_address(self._folder.place):
            alike["--backup-dir"] = self._folder.place
        return told | {"alike": alike}

    def rounds(self, events: Events) -> Iterator[Round]:
        """Yields the rounds in which this machine takes part.

        Args:
            events: From `deferred_signals`.

        Yields:
            A round. Its `failure` must be set before the next is asked for.

        Raises:
            ConfigurationError: Machine 0 has refused this one, or this one does not reach its folder for backups.
            PeerError: The other launchers did not come, or machine 0 was lost.
            RunFailed: The run has failed, on any machine, or a signal came.
        """
        threading.Thread(target=self._pass_on, args=(events,), daemon=True, name="tfrep-signals").start()
        while True:
            kind, content = self._seat.inbox.get()
            if kind == "round":
                yield from self._round(content)
            elif kind == "welcome":
                if content["mark"]:
                    check_reached(self._folder, content["mark"], self._node.name)
                self._seat.tell("ready", self.told())
            elif kind == "again":
                print(f"tfrep: {content}", file=sys.stderr)
                self._seat.tell("ready", self.told())
            elif kind == "line":
                _log.warning("Waiting at %s. %s.", self._node.rendezvous, content)
            elif kind == "signal":
                self.leave(128 + content)
                raise _stopped(content)
            elif kind == "over":
                if content.exit_code:
                    raise RunFailed(content.text, Failure(None, content.exit_code))
                if self._last is not None:
                    self._last.failure = None
                return
            elif kind == "error":
                raise content.error()
            elif kind == "lost":
                self._go_again()
            elif kind != "end":  # The launchers of a run without rounds meet here.
                raise ConfigurationError(
                    message(
                        "Machine 0 was started for a run without restarts, and this machine for one with them.",
                        hint="start all machines with the same --max-restarts and --nnodes.",
                        rendezvous=self._node.rendezvous,
                    )
                )

    def _round(self, start: RoundStart) -> Iterator[Round]:
        own = replace(self._node, rank=start.place, least=None, count=len(start.met))
        this = self._last = Round(start.number, self._events, Nodes(own, start.met))
        yield this
        self._seat.tell("report", self._report(this))

    def _report(self, this: Round) -> RoundReport:
        failure = this.failure
        if failure is None:
            return RoundReport(this.number, "well")
        if self._signals:
            return RoundReport(this.number, "left", exit_code=128 + self._signals[0])
        if failure.stopped_by_signal:
            return RoundReport(this.number, "told")
        ago = max(0.0, time.monotonic() - failure.time)
        return RoundReport(this.number, "failed", this.story, failure.exit_code, failure.was_lost, ago)

    def _hear(self, kind: str, content: Any) -> None:
        """Passes on an order to end to the ranks of the round. It may come before they are started."""
        if kind == "round":
            self._events = queue.SimpleQueue()
        elif kind == "lost" or kind == "end":
            events = self._events
            events.put((None, signal.SIGTERM))
            if kind == "lost" or content:
                impatient = threading.Timer(GRACE_SECONDS, lambda: events.put((None, signal.SIGKILL)))
                impatient.daemon = True
                impatient.start()

    def _pass_on(self, events: Events) -> None:
        while True:
            _, number = events.get()
            self._signals.append(number)
            self._events.put((None, number))
            self._seat.inbox.put(("signal", number))

    def _go_again(self) -> None:
        """Goes to machine 0 again if it was lost before there was a round, since it may be started again."""
        visit = self._visit
        if visit is None or self._last is not None or time.monotonic() > visit.deadline:
            raise self._without_machine_0()
        visit.own = replace(visit.own, told=self.told())

        def enter() -> Channel:
            if self._signals:
                raise _stopped(self._signals[0])
            return visit.enter(TO_SEATS)

        self.take(visit.insist(enter))
        for number in list(self._signals):  # It may have come to the seat that was lost.
            self._seat.inbox.put(("signal", number))

    def _without_machine_0(self) -> PeerError:
        return PeerError(
            message(
                "Machine 0, with the rendezvous of the run, was lost. All ranks of this machine were ended.",
                hint="start the run again on all machines: each fit resumes from its last backup.",
                rendezvous=self._node.rendezvous,
                backup_dir=str(self.options.backup_dir),
            )
        )


class _Judge:
    """Decides at machine 0 what the end of a round means.

    Args:
        options: What kind of run is wanted.
        backup_dir: Its folder for backups.
    """

    def __init__(self, options: Options, backup_dir: SharedFolder) -> None:
        assert options.node is not None
        self._is_elastic, self._backup_dir = options.node.is_elastic, backup_dir
        self._restarts = Restarts(options.max_restarts, backup_dir)

    def forget_steps(self) -> None:
        """Forgets the steps of an earlier run, and must not be called while another launcher is machine 0."""
        self._restarts.take_step()

    def decide(self, ended: RoundEnd) -> Verdict:
        """Tells whether there is another round."""
        step = self._restarts.take_step()
        first = ended.failures[0] if ended.failures else None
        gone = [f"{who} was lost" for who in ended.lost] + [f"{who} has left" for who in ended.left]
        told = "; ".join(gone) + "." if gone else first.story if first else ""
        if ended.ended_well:
            return Verdict(again=False)
        if self._is_elastic and (gone or ended.has_grown):
            what = told if gone else "Machines have come."
            return Verdict(again=True, text=f"{_sentence(what)} All ranks are started again. {where_it_goes_on(self._backup_dir)}")
        if not ended.lost and not (first and first.was_lost):
            exit_code = first.exit_code if first else ended.exit_code
            return Verdict(again=False, text=_sentence(told), exit_code=exit_code)
        exit_code = first.exit_code if first else 255
        again, what = self._restarts.after_loss(step)
        text = f"{_sentence(told)}\n{what}" if what else _sentence(told)
        return Verdict(again, text, 0 if again else exit_code)


def _stopped(number: int) -> RunFailed:
    return RunFailed(f"The run was stopped by {signal.Signals(number).name}.", Failure(None, 128 + number))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
