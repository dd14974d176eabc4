"""Starts the processes of a run, watches them, and ends all of them when one fails or the launcher is told to stop.

Nothing may be left behind, however a run ends. Every rank leads its own session, so that its whole group can be
signalled at once; processes that left the group are found through the process tree. A launcher that is killed without
warning can do nothing any more: a small guard process then reads the end of its pipe, and kills the ranks for it.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tfrep_strategy.cluster.hardware import bound_to
from tfrep_strategy.cluster.signs_of_life import LOOK_SECONDS, Frozen, Patience, Watch
from tfrep_strategy.errors import message
from tfrep_strategy.running.guard import Group, guard
from tfrep_strategy.running.notes import Note, read_notes

GRACE_SECONDS = 3.0
"""How long a rank may take to end once it was asked to, because another one failed, before it is killed."""

Events = queue.SimpleQueue[tuple[int | None, int]]
"""What the watcher waits for: (rank, return code) when a rank ended, (None, number) when a signal came."""

TIMED_OUT = 124
"""Exit code of a run whose time, or the time of one rank of it, was over, as with the command `timeout`."""

# The peers of a rank that dies fail a moment later, and may be noticed first. A rank that raises notes the time; one
# that dies without a word cannot, so its death is taken to lie this much before it was seen. SIGABRT is how native code
# reacts to the loss of a peer: it is a consequence, and earns no such credit.
_SILENT_DEATH_CREDIT = 0.25
_SETTLE_SECONDS = 0.1
_RAISE_SECONDS = 1.0
"""How long the others get to raise, too, when a rank has raised an error: the user is told whether all failed alike."""
_KILL_SECONDS = 5.0
"""How long a rank may take to end once it was killed. The kernel may keep one that waits for a disk, or is in a frozen cgroup."""
_IMPATIENT = (signal.SIGINT, signal.SIGKILL)
"""Signals that break off the grace period."""


@dataclass(frozen=True)
class Command:
    """The command of one rank.

    Attributes:
        arguments: The command line.
        environ: All of its environment variables.
        cores: Numbers of the cores that it is bound to; none if it may use all of this process.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Streams:
    """Input and output of one rank.

    Attributes:
        log: The file that output goes to; None: where that of this process goes.
        mode: "wb", or "ab" if the log goes on.
        reads: Whether the input is that of this process, and not empty.
    """

    log: Path | None = None
    mode: str = "wb"
    reads: bool = True


_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""The signals that end a run when its launcher gets them."""


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        rank: The rank that failed first; `None` when the run was stopped from outside or its time was over.
        exit_code: The exit code of that rank and so of the run; 128 + n if signal n ended it.
        traceback: Where Python left the rank's code, if it got to say so.
        noted: Whether the rank itself told of its failure.
        log_size: How many bytes the rank's log had when it failed, if it got to say so.
        frozen: What was seen of a rank that did not end, and for which no process should wait.
        time: When the rank failed, on the machine's monotonic clock.
        error: The name of the exception that it raised; empty if it raised none.
        alike: All ranks of this machine that raised the same exception, if there are several.
        where: If a rank is frozen: where each rank of this machine was, in lines.
    """

    rank: int | None
    exit_code: int
    traceback: str = ""
    noted: bool = False
    log_size: int | None = None
    frozen: str = ""
    time: float = field(default=0.0, compare=False)
    error: str = ""
    alike: Sequence[int] = ()
    where: Sequence[str] = field(default=(), compare=False)

    @property
    def stopped_by_signal(self) -> bool:
        """Whether a signal to the launcher, and no rank, ended the run."""
        return self.rank is None and self.exit_code - 128 in _STOPPING

    @property
    def was_lost(self) -> bool:
        """Whether a rank was killed or is frozen, so that the run may end well if it is started again.

        An error of the script would come again. A rank that was asked to end (SIGTERM) was not lost.
        """
        # What is killed leaves no note; `sys.exit(-1)` does, and its exit code, 255, is that of no signal.
        killed = self.exit_code - 128 in signal.valid_signals() - {signal.SIGTERM}
        return self.rank is not None and (bool(self.frozen) or (killed and not self.noted))


@contextlib.contextmanager
def deferred_signals() -> Iterator[Events]:
    """Collects SIGINT, SIGTERM and SIGHUP while the body runs, and delivers the first when it is done.

    What the signal was meant to do (raise `KeyboardInterrupt`, end the process) thus happens after the clean-up.
    Outside of the main thread Python offers no way to do this, and signals keep their meaning.

    Yields:
        The queue that receives the signals.

    Example:
        >>> with contextlib.suppress(KeyboardInterrupt), deferred_signals() as events:
        ...     signal.raise_signal(signal.SIGINT)
        ...     events.get() == (None, signal.SIGINT)
        True
    """
    events: Events = queue.SimpleQueue()
    received: list[int] = []

    def remember(number: int, frame: object) -> None:
        received.append(number)
        events.put((None, number))

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOPPING:
            # Ignored on purpose, as by nohup: stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, remember)
    try:
        yield events
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def start_process(command: Command, streams: Streams) -> subprocess.Popen[bytes]:
    """Starts a rank as the leader of a new session.

    Args:
        command: What it runs.
        streams: Its input and output.

    Example:
        >>> start_process(Command(["true"], os.environ), Streams()).wait()
        0
    """
    with contextlib.ExitStack() as stack:
        log = None if streams.log is None else stack.enter_context(open(streams.log, streams.mode))
        stack.enter_context(bound_to(command.cores))
        return subprocess.Popen(
            command.arguments,
            env=dict(command.environ),
            start_new_session=True,
            stdin=None if streams.reads else subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
        )


def run_ranks(
    commands: Sequence[Command],
    events: Events,
    *,
    log_dir: Path,
    note_dir: Path,
    timeout: float | None = None,
    logs_all: bool = False,
    first_rank: int = 0,
    again: bool = False,
    patience: Patience | None = None,
    name: str = "Rank {}",
    grace: float = GRACE_SECONDS,
    temporary: Sequence[Path] = (),
    on_start: Callable[[list[int]], None] | None = None,
) -> Failure | None:
    """Runs one process per command until all end well or one does not; none is left when this returns, but one that the
    kernel does not let end, which is named.

    Rank 0 has the terminal: its input and output are those of this process. The others write to `rank<k>.log`. With `logs_all`
    rank 0 writes to a log, too.

    Args:
        commands: What each rank runs.
        events: From `deferred_signals`.
        log_dir: Folder of the log files.
        note_dir: Folder in which ranks that fail leave their notes, and all give their signs of life.
        timeout: Seconds after which the run is stopped; by default it may take for ever.
        logs_all: Whether the output of rank 0 goes to a log, too.
        first_rank: The rank of the first command. Ranks on other machines are run by other launchers.
        again: Whether the run was started before. Its logs go on then.
        patience: How long a rank may be stopped or silent; by default it is not checked.
        name: What a rank is called in warnings, with its number for `{}`.
        grace: How many seconds ranks may take to end when a signal to this process ends the run.
        temporary: Folders that are removed if this process is killed. Else the code that made them removes them.
        on_start: Gets the process ids of the ranks when all are started.

    Returns:
        `None` if every rank ended with exit code 0, else what went wrong first.

    Example:
        >>> with deferred_signals() as events:
        ...     run_ranks([Command(["true"], os.environ)], events, log_dir=Path(), note_dir=Path()) is None
        True
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    run = _Run(events, note_dir, log_dir, None if patience is None else Watch(note_dir, patience, name), name)
    stop_with: int = signal.SIGTERM
    seconds_to_end = GRACE_SECONDS
    with guard(temporary) as watch_group:
        try:
            for rank, command in enumerate(commands, first_rank):
                log = log_dir / f"rank{rank}.log" if rank or logs_all else None
                watch_group(run.start(rank, command, Streams(log, "ab" if again else "wb", reads=not rank)))
            if on_start is not None:
                on_start(run.pids)
            try:
                number = run.wait(deadline)
            except queue.Empty:
                return Failure(None, TIMED_OUT)
            if number is not None:
                stop_with, seconds_to_end = number, grace
                return Failure(None, 128 + number)
            return run.failure()
        finally:
            run.end(stop_with, seconds_to_end)


class _Run:
    """The processes of one run, and how they ended."""

    def __init__(self, events: Events, note_dir: Path, log_dir: Path, watch: Watch | None, name: str) -> None:
        self._events = events
        self._reporting, self._is_over = threading.Lock(), False
        self._name = name
        self._note_dir, self._log_dir = note_dir, log_dir
        self._watch = watch
        self._frozen: Frozen | None = None
        self._groups: list[Group] = []
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        return [self._pids[rank] for rank in sorted(self._pids)]

    def start(self, rank: int, command: Command, streams: Streams) -> Group:
        """Starts a rank and a thread that reports its end; returns its group."""
        process = start_process(command, streams)
        self._groups.append(Group.of(process.pid))
        self._pids[rank] = process.pid
        threading.Thread(target=self._report_end, args=(rank, process), daemon=True).start()
        return self._groups[-1]

    def wait(self, deadline: float | None) -> int | None:
        """Waits until all ranks ended well, or one failed or is frozen; returns the number of a signal that came instead."""
        while len(self._codes) < len(self._groups):
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank, code = self._events.get(timeout=min(left, LOOK_SECONDS))
            except queue.Empty:
                if left <= LOOK_SECONDS:
                    raise
                if self._sees_frozen():
                    return None
                continue
            if rank is None:
                return code
            self._note_end(rank, code)
            if code:
                return self._settle()
        return None

    def failure(self) -> Failure | None:
        """Tells which rank failed first, if any."""
        if self._frozen is not None:
            where = tuple(self._frozen.hang.lines())
            return Failure(self._frozen.rank, TIMED_OUT, frozen=self._frozen.seen, time=time.monotonic(), where=where)
        notes = read_notes(self._note_dir)
        died = {rank: code for rank, code in self._codes.items() if code}

        def when(rank: int) -> float:
            if rank in notes:
                return notes[rank].time
            return self._ended_at[rank] - (0 if died[rank] == -signal.SIGABRT else _SILENT_DEATH_CREDIT)

        rank = min(notes.keys() | died.keys(), key=when, default=None)
        if rank is None:
            return None
        note = notes.get(rank, Note(0.0, 0))
        code = died.get(rank, note.exit_code)
        exit_code = 128 - code if code < 0 else code
        alike = sorted(each for each in notes if note.error and notes[each].error == note.error)
        return Failure(
            rank, exit_code, note.traceback, noted=rank in notes, log_size=note.log_size, time=when(rank), error=note.error,
            alike=alike if len(alike) > 1 else (),
        )  # fmt: skip

    def end(self, first_signal: int, grace: float) -> None:
        """Ends what still runs: asks, waits for the grace period, then kills.

        A scheduler may ask several times. Who types Ctrl-C, or decides over several launchers, does not want to wait.
        """
        trees = [member for group in self._groups for member in group.descendants()]
        if len(self._codes) < len(self._groups):
            self._signal(trees, first_signal)
        signals: list[int] = []
        self._take_ends(grace, signals, _IMPATIENT)
        self._signal(trees, signal.SIGKILL)
        self._take_ends(_KILL_SECONDS, signals)
        with self._reporting:
            self._is_over = True
        for number in signals:  # The run may have been started again.
            self._events.put((None, number))
        for rank in self._pids.keys() - self._codes.keys():
            self._tell_of_undead(self._name.format(rank), self._pids[rank])

    def _take_ends(self, seconds: float, signals: list[int], impatient: Collection[int] = ()) -> None:
        """Waits until all have ended, for some seconds, or until an impatient signal comes. Notes the signals."""
        deadline = time.monotonic() + seconds
        while len(self._codes) < len(self._groups) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                rank, code = self._events.get(timeout=left)
                if rank is not None:
                    self._note_end(rank, code)
                else:
                    signals.append(code)
                    if code in impatient:
                        return

    def _report_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._reporting:
            if not self._is_over:  # Else the events are those of another start.
                self._events.put((rank, code))

    def _tell_of_undead(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            what = f"{name} was killed, and does not end: the kernel keeps it. It is left behind."
            hint = "a disk or a network that it waits for may be gone, or its cgroup be frozen."
            print(f"tfrep: {message(what, hint=hint, pid=pid, state=psutil.Process(pid).status())}", file=sys.stderr)

    def _sees_frozen(self) -> bool:
        if self._watch is not None:
            self._frozen = self._watch.look({rank: pid for rank, pid in self._pids.items() if rank not in self._codes})
            if self._frozen is not None:
                self._frozen.hang.write(self._log_dir)
        return self._frozen is not None

    def _settle(self) -> int | None:
        """Gives other deaths of the same moment the time to be seen; returns the number of a signal that came instead."""
        number = self._take_deaths(_SETTLE_SECONDS)
        deadline = time.monotonic() + _RAISE_SECONDS
        while number is None and time.monotonic() < deadline:
            notes = read_notes(self._note_dir)
            if not any(note.error for note in notes.values()) or notes.keys() | self._codes.keys() >= self._pids.keys():
                break
            number = self._take_deaths(_SETTLE_SECONDS)
        return number

    def _take_deaths(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                rank, code = self._events.get(timeout=left)
                if rank is None:
                    return code
                self._note_end(rank, code)
        return None

    def _note_end(self, rank: int, code: int) -> None:
        self._codes[rank], self._ended_at[rank] = code, time.monotonic()

    def _signal(self, trees: Sequence[psutil.Process], number: int) -> None:
        for group in self._groups:  # It may outlive its leader.
            group.send(number)
        for member in trees:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
