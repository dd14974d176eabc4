"""Signs of life: each rank gives one every second, and an outside process, its launcher, finds stopped and silent ranks.

A sign also says where the rank is (`flight_recorder.py`).

For a rank without a launcher of this package, its watcher does this (`watcher.py`).

A rank cannot tell that it is stopped, nor that native code keeps Python's lock from its threads. The others only see that it does
not arrive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tfrep_strategy.cluster.flight_recorder import RECORDER, Hang, Whereabouts, hang_of
from tfrep_strategy.core.limits import longest_silence, timeout_seconds

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval at which a launcher should look."""

_SIGN_SECONDS = 1.0
_STOPPED_SECONDS = 15.0
"""Seconds that a rank may be stopped. Horovod's own limit is 30 seconds, TensorFlow's between machines 20; then others fail."""
_IDLE_SECONDS, _LEAST_IDLE_SECONDS = 25.0, 3.0
"""Seconds that a rank may be silent and idle. Its work is measured from time to time, so it may take twice as long."""
_WARNED_SECONDS = 60.0
_IDLE_CPU, _IDLE_BYTES = 0.03, 100_000.0
"""The most that a rank whose Python is stuck may use in a second, since TensorFlow's threads wake up now and then."""
_WHY = {psutil.STATUS_DISK_SLEEP: "a disk or a network does not answer, or its cgroup is frozen"}
_ELSE_WHY = "native code may hold Python's lock, or its cgroup is frozen"

_is_watched = threading.Event()


def give_signs(folder: Path | None, rank: int) -> None:
    """Gives a sign of life every second, in a thread, for as long as this process can run Python code.

    Args:
        folder: Where the launcher looks. Without it no sign is given, as on a machine other than the launcher's.
        rank: The rank of this process.

    Example:
        >>> give_signs(None, rank=1)
    """
    if folder is not None and folder.is_dir():
        _is_watched.set()
        start_signs(folder, rank)


def is_watched() -> bool:
    """Returns whether this process gives signs of life to a launcher.

    Example:
        >>> is_watched()
        False
    """
    return _is_watched.is_set()


def start_signs(folder: Path, rank: int) -> None:
    """Gives signs of life as `give_signs` does, until the folder is gone.

    Args:
        folder: The folder where an outside process looks.
        rank: The rank of this process.

    Example:
        >>> start_signs(Path(), rank=1)
    """
    path = _path(folder, rank)
    with contextlib.suppress(OSError):  # The disk may be full. The launcher then expects no signs.
        # The file stays open until this process becomes another program (`os.exec`), which gives no signs.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(file, f"{os.getpid()}\n".encode())
        threading.Thread(target=_give_signs, args=(path, file), daemon=True, name="tfrep-signs").start()


def _give_signs(path: Path, file: int) -> None:
    begin = os.fstat(file).st_size
    with contextlib.suppress(OSError):  # The launcher has ended, and removed the folder.
        while True:
            os.utime(path)
            with contextlib.suppress(OSError):  # The disk is full.
                os.ftruncate(file, os.pwrite(file, json.dumps(asdict(RECORDER.whereabouts())).encode(), begin) + begin)
            time.sleep(_SIGN_SECONDS)


def _read_sign(path: Path) -> tuple[int, Whereabouts | None]:
    """Returns the process id of a rank, 0 if it has not written it yet, and where the rank is, if it has said so."""
    pid, _, where = path.read_text("utf-8", "replace").partition("\n")
    with contextlib.suppress(ValueError, TypeError, KeyError):  # It is being written.
        return int(pid or 0), Whereabouts.of_json(json.loads(where))
    return int(pid or 0), None


@dataclass(frozen=True)
class Patience:
    """How long others tolerate a rank; `math.inf` means forever.

    Attributes:
        stopped: Seconds that a rank may be stopped.
        idle: Seconds that it may give no sign of life and do nothing.
        warned: Seconds without a sign of life after which the user is warned.
        silent: Seconds without a sign of life after which the rank is ended.
    """

    stopped: float
    idle: float
    warned: float
    silent: float

    @classmethod
    def of_environment(cls) -> Patience:
        """Returns the limits from `TFREP_TIMEOUT` and `TFREP_SILENCE_TIMEOUT`.

        Raises:
            ConfigurationError: One of them is not a number of seconds.

        Example:
            >>> Patience.of_environment()
            Patience(stopped=15.0, idle=25.0, warned=60.0, silent=1800.0)
        """
        limit, silent = timeout_seconds(), longest_silence()
        if limit == math.inf:
            return cls(math.inf, math.inf, math.inf, math.inf)
        idle = math.inf if silent == math.inf else min(_IDLE_SECONDS, max(_LEAST_IDLE_SECONDS, limit / 2), silent)
        return cls(min(_STOPPED_SECONDS, limit / 2), idle, min(_WARNED_SECONDS, silent / 2), silent)


@dataclass(frozen=True)
class _Work:
    """The work of a process up to some time.

    Attributes:
        silent: Seconds since its last sign of life.
        cpu: Seconds of CPU time that it had used.
        transferred: Bytes that it had read and written.
    """

    silent: float = 0.0
    cpu: float = 0.0
    transferred: float = 0.0


@dataclass(frozen=True)
class Frozen:
    """A rank that is not worth waiting for.

    Attributes:
        rank: The rank.
        seen: Its observed state, worded to follow "Rank 1".
        where: Where it said that it was, for each rank of this machine.
    """

    rank: int
    seen: str
    where: Mapping[int, Whereabouts | None] = field(default_factory=dict)

    @property
    def hang(self) -> Hang:
        """The report."""
        return hang_of(f"Rank {self.rank} {self.seen}.", self.where, {self.rank: self.seen})


class Watch:
    """Observes the ranks of this machine from outside.

    Args:
        folder: The folder with the ranks' signs.
        patience: How long to tolerate them.
        name: The name of a rank, with its number for `{}`.

    Example:
        >>> watch = Watch(Path(), Patience.of_environment())
        >>> watch.look({0: os.getpid()}) is None
        True
    """

    def __init__(self, folder: Path, patience: Patience, name: str = "Rank {}") -> None:
        self._folder, self._patience, self._name = folder, patience, name
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._last = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> Frozen | None:
        """Looks once. Warns of a silent rank.

        Args:
            pids: The processes that the launcher has started as ranks. A rank that one of them has started is
                found by its signs.

        Returns:
            A rank whose time is over, if there is one.
        """
        now = time.monotonic()
        # If this process was itself held up, it cannot know the state of the ranks meanwhile.
        passed, self._last = min(now - self._last, 2 * LOOK_SECONDS), now
        for rank, pid in {**pids, **self._signed()}.items():
            with contextlib.suppress(psutil.Error, OSError):  # It has ended.
                if (rank, pid) not in self._ranks:
                    self._ranks[rank, pid] = _Rank(self._name.format(rank), psutil.Process(pid), _path(self._folder, rank))
                seen = self._ranks[rank, pid].look(passed, self._patience)
                if seen:
                    where = {each: where for each, (_, where) in sorted(self._signs().items())}
                    return Frozen(rank, seen, where)
        return None

    def _signed(self) -> dict[int, int]:
        return {rank: pid for rank, (pid, _) in self._signs().items() if pid}

    def _signs(self) -> dict[int, tuple[int, Whereabouts | None]]:
        return {int(path.stem): _read_sign(path) for path in self._folder.glob("*.life")}


class _Rank:
    """The observed state of a rank."""

    def __init__(self, name: str, process: psutil.Process, path: Path) -> None:
        self._name, self._process, self._path = name, process, path
        self._stopped = self._silent = 0.0
        self._switches = 0
        self._at_sign = self._measured = _Work()
        self._sign: int | None = None
        self._is_named = False

    def look(self, passed: float, patience: Patience) -> str:
        """Looks once. Returns the observed state if the time of the rank is over.

        Args:
            passed: Seconds since the last look.
            patience: How long to tolerate it.
        """
        status = self._process.status() if self._process.is_running() else psutil.STATUS_ZOMBIE
        # A process that has run since the last look was not stopped all the time.
        before, self._switches = self._switches, sum(self._process.num_ctx_switches())
        is_stopped = status == psutil.STATUS_STOPPED and self._switches == before
        self._stopped = self._stopped + passed if is_stopped else 0.0
        if self._stopped > patience.stopped:
            return f"is stopped (state T), for {self._stopped:.0f} seconds by now"
        if self._gives_signs() or status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):
            return ""
        self._silent += passed
        is_idle = self._is_idle(patience.idle)
        if not (is_idle or self._silent >= patience.warned) or not self._should_give_signs():
            return ""
        used = self._work().cpu - self._at_sign.cpu
        seen = f"has given no sign of life for {self._silent:.0f} seconds, in which it used {used:.1f} of CPU time"
        if is_idle:
            return f"{seen} (state: {status}; {_WHY.get(status, _ELSE_WHY)})"
        if self._silent > patience.silent:
            return seen
        if not self._is_named:
            self._is_named = True
            end = "" if patience.silent == math.inf else f" It is ended after {patience.silent:g} seconds."
            _log.warning(
                "%s %s (state: %s). Native code may hold Python's lock.%s\nHint: TFREP_SILENCE_TIMEOUT sets the limit.",
                self._name, seen, status, end)  # fmt: skip
        return ""

    def _gives_signs(self) -> bool:
        """Returns whether it has given a sign since the last look, or never gave one."""
        sign = self._path.stat().st_mtime_ns if self._path.exists() else None
        if sign is not None and sign == self._sign:
            return False
        self._sign, self._silent, self._is_named = sign, 0.0, False
        self._at_sign = self._measured = self._work()
        return True

    def _is_idle(self, seconds: float) -> bool:
        """Returns whether it has been idle for so long."""
        before = self._measured
        passed = self._silent - before.silent
        if passed < seconds:
            return False
        self._measured = now = self._work()
        return now.cpu - before.cpu < _IDLE_CPU * passed and now.transferred - before.transferred < _IDLE_BYTES * passed

    def _should_give_signs(self) -> bool:
        """Returns whether it is still the program that gave signs."""
        own = str(self._path.resolve())
        return any(file.path == own for file in self._process.open_files())

    def _work(self) -> _Work:
        times, transferred = self._process.cpu_times(), 0
        with contextlib.suppress(psutil.AccessDenied, AttributeError):  # Not every system reports this.
            transferred = sum(self._process.io_counters()[2:])
        return _Work(self._silent, times.user + times.system, transferred)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.life"
