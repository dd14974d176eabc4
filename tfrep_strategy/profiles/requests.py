"""How the processes of a run on this machine are asked to trace themselves: by a file in a folder of their user.

Each process has a thread that looks at the file twice a second. So a step costs nothing, and no port is open. Only those who answer
load TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.profiles.summary import TraceReport

_LOOK_SECONDS = 0.5
_WAIT_SECONDS = 0.01
_START_SECONDS = 10.0
"""How long a process may take to begin. One that holds Python's lock cannot."""
_ANSWER_SECONDS = 120.0
"""How long a process may take to write and read its trace."""
_REQUEST = "profile.request"

here: tuple[Path, str] | None = None
"""Where this process is asked, and who it is; None outside of a run."""


@dataclass(frozen=True)
class _Request:
    """What is asked.

    Attributes:
        name: A new one.
        pid: Of the process that asks.
        run_folder: For the traces.
        start: When to start, in seconds since the epoch. All processes of a machine have one clock.
        stop: When to stop; None: when the request says so, or is gone.
    """

    name: str
    pid: int
    run_folder: str
    start: float
    stop: float | None

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{self.name}.unfinished"
        unfinished.write_text(json.dumps(asdict(self)), "utf-8")
        os.replace(unfinished, folder / _REQUEST)


def _read(folder: Path) -> _Request | None:
    try:
        return _Request(**json.loads((folder / _REQUEST).read_text("utf-8")))
    except FileNotFoundError:
        return None


# Those who answer.


def answer_requests(folder: Path | None, who: str) -> None:
    """Traces this process whenever it is asked to, in a thread, for as long as it runs.

    Args:
        folder: Where it is asked; nobody asks if there is none, as on a machine that is not the launcher's.
        who: This process, such as "rank0".

    Example:
        >>> answer_requests(None, "rank0")
    """
    global here
    if folder is None or not folder.is_dir():
        return
    here = folder, who
    (folder / f"{who}.profiled").write_text(str(os.getpid()), "utf-8")
    threading.Thread(target=_answer_requests, args=(folder, who), daemon=True, name="tfrep-profile").start()


def _answer_requests(folder: Path, who: str) -> None:
    answered = ""
    with contextlib.suppress(OSError):  # The launcher has ended, and removed its folder.
        while folder.is_dir():
            request = _read(folder)
            if request is not None and request.name != answered:
                answered = request.name
                _answer(folder, who, request)
            time.sleep(_LOOK_SECONDS)


def _answer(folder: Path, who: str, request: _Request) -> None:
    from tfrep_strategy.profiles.tracer import Trace

    trace = Trace(Path(request.run_folder), who)
    time.sleep(max(0.0, request.start - time.time()))
    trace.begin()
    if request.stop is not None:  # On a busy machine a trace begins late. It lasts as long as was asked for.
        request = replace(request, stop=request.stop + max(0.0, time.time() - request.start))
    (folder / f"{request.name}.{who}.started").touch()
    while not _is_over(request):
        time.sleep(_WAIT_SECONDS if request.stop is None else max(0.0, request.stop - time.time()))
        if request.stop is None:
            now = _read(folder)
            request = now if now is not None and now.name == request.name else replace(request, stop=0.0)
    report = trace.end()
    unfinished = folder / f"{request.name}.{who}.unfinished"
    unfinished.write_text(json.dumps(asdict(report)), "utf-8")
    os.replace(unfinished, folder / f"{request.name}.{who}.report")


def _is_over(request: _Request) -> bool:
    return request.stop is not None and time.time() >= request.stop


# Those who ask.


class Asked:
    """Asks all processes of a run on this machine to trace themselves at the same time.

    Args:
        folder: Where they are asked.
        run_folder: The folder for the traces.
        seconds: For how long; None: until `end`. They have started then when this returns.

    Raises:
        ConfigurationError: Nobody is there to ask, or somebody else is asking.
    """

    def __init__(self, folder: Path, run_folder: Path, seconds: float | None = None) -> None:
        self._folder = folder
        self._pids = {path.stem: int(text) for path in folder.glob("*.profiled") if (text := path.read_text("utf-8"))}
        if not self._alive():
            hint = "wait until the script has begun."
            raise ConfigurationError(message("No process of this run can be traced yet.", hint=hint, run=str(folder)))
        other = _read(folder)
        if other is not None and psutil.pid_exists(other.pid):
            hint = "wait until it is done."
            raise ConfigurationError(message("Another profile of this run is being made.", hint=hint, pid=other.pid))
        start = time.time() + 2 * _LOOK_SECONDS  # All have seen the request by then.
        stop = None if seconds is None else start + seconds
        self._request = _Request(uuid.uuid4().hex, os.getpid(), str(run_folder), start, stop)
        self._request.write(folder)
        if seconds is None:
            self._wait_for("started", _START_SECONDS)

    def end(self) -> list[TraceReport]:
        """Ends the traces, and waits for their reports.

        Returns:
            The reports, by process.

        Raises:
            PeerError: All processes have ended meanwhile.
        """
        if self._request.stop is None:
            self._request = replace(self._request, stop=time.time())
            self._request.write(self._folder)
        left = max(0.0, (self._request.stop or 0.0) - time.time())
        try:
            found = self._wait_for("report", left + _ANSWER_SECONDS)
            reports = {who: TraceReport(**json.loads(path.read_text("utf-8"))) for who, path in found.items()}
        except FileNotFoundError:
            reports = {}
        with contextlib.suppress(FileNotFoundError):
            (self._folder / _REQUEST).unlink()
        if not reports and not self._alive():
            raise PeerError(message("The run has ended while it was profiled.", hint="take fewer seconds.", run=str(self._folder)))
        missing = (TraceReport(who, problem="it has ended, or did not answer.") for who in self._pids if who not in reports)
        return sorted([*reports.values(), *missing], key=lambda report: (len(report.who), report.who))

    def _wait_for(self, what: str, seconds: float) -> dict[str, Path]:
        """Waits until all processes that are alive have written a file; returns the files."""
        deadline = time.monotonic() + seconds
        while True:
            paths = {who: self._folder / f"{self._request.name}.{who}.{what}" for who in self._pids}
            found = {who: path for who, path in paths.items() if path.exists()}
            if self._alive() <= found.keys() or time.monotonic() > deadline:
                return found
            time.sleep(_WAIT_SECONDS)

    def _alive(self) -> set[str]:
        return {who for who, pid in self._pids.items() if self._folder.is_dir() and _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
