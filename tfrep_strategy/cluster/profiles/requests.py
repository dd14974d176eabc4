"""Requests for traces: the steps of a run to trace, and the command that asks running processes to trace themselves.

The request is a file in a folder of the user on this machine. Each process has a thread that looks for the file twice a second, and
traces for as long as the file exists. So a step costs nothing, and no port is open. Only the traced processes load TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import BeforeValidator

from tfrep_strategy.cluster.profiles.summary import TraceReport, show_summary, write_summary
from tfrep_strategy.core.validation import ProfiledSeconds, checked, variable, writable
from tfrep_strategy.errors import ConfigurationError, PeerError, message

_SKIPPED = 5
"""Steps before the traced ones, if only their number is given. The first steps are compiled, and fill caches."""
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class TracedSteps:
    """Steps of a `fit`, counted from 0.

    Attributes:
        first: The first traced step.
        end: The step after the last traced one.
    """

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


def _steps(given: str) -> TracedSteps:
    numbers = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", given)
    if numbers is None:
        raise ValueError("write the number of steps, or FROM:TO")
    first = _SKIPPED if numbers[1] is None else int(numbers[1])
    end = int(numbers[2]) + (first if numbers[1] is None else 0)
    if not 0 < end - first <= _MOST_STEPS:
        raise ValueError(f"from 1 to {_MOST_STEPS} steps can be traced")
    return TracedSteps(first, end)


_Steps = Annotated[TracedSteps, BeforeValidator(_steps)]


def traced_steps(profile: str) -> TracedSteps:
    """Reads the steps that a user wants to trace.

    Args:
        profile: The number of steps, or "FROM:TO": from step FROM up to, but without, step TO.

    Returns:
        The steps. Without FROM they begin after the first five.

    Raises:
        ConfigurationError: The text has another form, or means no steps.

    Example:
        >>> traced_steps("10"), traced_steps("20:30")
        (TracedSteps(first=5, end=15), TracedSteps(first=20, end=30))
    """
    return checked(_Steps, "profile", profile, hint='e.g. "10": ten steps, or "20:30": from step 20 up to step 29.')


def steps_of_environment() -> TracedSteps | None:
    """Returns the steps that `TFREP_PROFILE` names, which `tfrep run --profile` sets; None if it is not set.

    Raises:
        ConfigurationError: `TFREP_PROFILE` names no steps.

    Example:
        >>> os.environ["TFREP_PROFILE"] = "20:30"
        >>> print(steps_of_environment())
        20:30
    """
    return variable(_Steps, "TFREP_PROFILE", default=None)


def folder_of_environment() -> Path:
    """Returns the folder for traces: `TFREP_PROFILE_DIR`, by default `tfrep-profile` in the current folder.

    Example:
        >>> folder_of_environment().name
        'tfrep-profile'
    """
    return Path(os.environ.get("TFREP_PROFILE_DIR") or "tfrep-profile").absolute()


def profile_folder(profile_dir: str | os.PathLike[str] | None, log_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder for traces of a run that this process starts.

    Args:
        profile_dir: The folder that the user wants, if any.
        log_dir: The folder for logs that the user wants, if any. The default is inside it.

        Returns:
            The absolute path. The folder is not made.

    Example:
        >>> profile_folder(None, "logs").parts[-2:]
        ('logs', 'profile')
    """
    if profile_dir is not None:
        return Path(profile_dir).absolute()
    return folder_of_environment() if log_dir is None else Path(log_dir).absolute() / "profile"


def profile_environ(profile: str | None, folder: Path) -> dict[str, str]:
    """Makes the folder for traces, if steps are to be traced, and returns the variables for the processes of a run.

    Args:
        profile: The steps, if any.
        folder: The folder for traces.

    Raises:
        ConfigurationError: The folder is not writable.

    Example:
        >>> profile_environ(None, Path("profile"))
        {}
    """
    if profile is None:
        return {}
    return {"TFREP_PROFILE": profile, "TFREP_PROFILE_DIR": str(writable_folder(folder))}


def writable_folder(folder: Path) -> Path:
    """Makes the folder for traces, if there is none.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: It cannot be made, or is not writable.

    Example:
        >>> writable_folder(Path("profile")).name
        'profile'
    """
    return writable("profile_dir", folder)


def new_run_folder(folder: Path) -> Path:
    """Returns a path for the traces of all processes: each is a host of one run in TensorBoard. The folder is not made.

    Args:
        folder: The folder for traces, the one for `tensorboard --logdir`.

    Example:
        >>> new_run_folder(Path("profile")).parts[:3]
        ('profile', 'plugins', 'profile')
    """
    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    path, number = folder / "plugins" / "profile" / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}_{number}")
    return path


_LOOK_SECONDS = 0.5
_WAIT_SECONDS = 0.01
_ANSWER_SECONDS = 120.0
"""Seconds that a process may take to write and read its trace."""
_REQUEST = "profile.request"
_PROFILE_DIR = "profile.folder"

here: tuple[Path, str] | None = None
"""The folder of this process's requests, and its name; None outside of a run."""


def _read(folder: Path) -> dict[str, str] | None:
    """Returns the current request: its name, its sender, the folder for traces, and when to start."""
    with contextlib.suppress(FileNotFoundError):
        request = json.loads((folder / _REQUEST).read_text("utf-8"))
        if psutil.pid_exists(int(request["pid"])):
            return request
    return None


def _write(path: Path, content: object) -> None:
    """Writes JSON. Readers never see a part of it."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content), "utf-8")
    os.replace(unfinished, path)


# The traced processes.


def answer_requests(folder: Path | None, who: str) -> None:
    """Traces this process on request, in a thread, for as long as it runs.

    Args:
        folder: The folder of requests. Without it there are none, as on a machine other than the launcher's.
        who: The name of this process, such as "rank0".

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
    with contextlib.suppress(OSError):  # The launcher has ended, and removed its folder.
        while folder.is_dir():
            request = _read(folder)
            if request is not None:
                _answer(folder, who, request)
            time.sleep(_LOOK_SECONDS)


def _answer(folder: Path, who: str, request: dict[str, str]) -> None:
    from tfrep_strategy.cluster.profiles.traces import Trace

    trace = Trace(Path(request["run_folder"]), who)
    time.sleep(max(0.0, float(request["start"]) - time.time()))
    trace.begin()
    while _read(folder) == request:
        time.sleep(_WAIT_SECONDS)
    _write(folder / f"{request['name']}.{who}.report", asdict(trace.end()))


# The process that asks.


def name_of_folder() -> str:
    """Returns how the name of this launcher's folder begins. It contains the process id, by which others find the folder.

    Example:
        >>> name_of_folder() == f"tfrep-{os.getpid()}-"
        True
    """
    return f"tfrep-{os.getpid()}-"


def keep_profile_dir(folder: Path, profile_dir: Path) -> None:
    """Records the folder for traces of a run, for processes that ask.

    Args:
        folder: The folder of requests.
        profile_dir: The folder for traces.

    Example:
        >>> keep_profile_dir(Path(), Path("profile"))
    """
    (folder / _PROFILE_DIR).write_text(str(profile_dir), "utf-8")


def find_run(pid: int) -> tuple[Path, Path]:
    """Finds a run of this user on this machine.

    Args:
        pid: The process id of its launcher.

    Returns:
        The folder of its requests, and its folder for traces.

    Raises:
        ConfigurationError: There is no such run.

    Example:
        >>> find_run(1)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: No run of yours has this process id: it may have ended...
    """
    for folder in Path(tempfile.gettempdir()).glob(f"tfrep-{pid}-*") if psutil.pid_exists(pid) else ():
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid():  # Another user may have written anything.
                return folder, Path((folder / _PROFILE_DIR).read_text("utf-8"))
    what = "No run of yours has this process id: it may have ended."
    raise ConfigurationError(message(what, hint="name the process id of `tfrep run`.", run=pid))


class ProfileRequest:
    """Asks all processes of a run on this machine to trace themselves at the same time, from the return of this call until `end`.

    Args:
        folder: The folder of requests.
        run_folder: The folder for the traces.

    Raises:
        ConfigurationError: The run has no process to ask, or another request is open.
    """

    def __init__(self, folder: Path, run_folder: Path) -> None:
        self._folder, self._name = folder, uuid.uuid4().hex
        self._pids = {path.stem: int(text) for path in folder.glob("*.profiled") if (text := path.read_text("utf-8"))}
        if not self._alive():
            hint = "wait until the script has begun."
            raise ConfigurationError(message("No process of this run can be traced yet.", hint=hint, run=str(folder)))
        if (other := _read(folder)) is not None:
            hint = "wait until it is done."
            raise ConfigurationError(message("Another profile of this run is being made.", hint=hint, pid=other["pid"]))
        start = time.time() + 2 * _LOOK_SECONDS  # By then all have seen the request. All processes of a machine have one clock.
        request = {"name": self._name, "pid": str(os.getpid()), "run_folder": str(run_folder), "start": str(start)}
        _write(folder / _REQUEST, request)
        time.sleep(2 * _LOOK_SECONDS)

    def wait(self, seconds: float) -> None:
        """Waits for some seconds, or until all processes have ended."""
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))

    def end(self) -> list[TraceReport]:
        """Ends the traces, and waits for their reports.

        Returns:
            The reports, by process.

        Raises:
            PeerError: All processes have ended meanwhile.
        """
        (self._folder / _REQUEST).unlink(missing_ok=True)
        deadline = time.monotonic() + _ANSWER_SECONDS
        paths = {who: self._folder / f"{self._name}.{who}.report" for who in self._pids}
        while not self._alive() <= {who for who, path in paths.items() if path.exists()} and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)
        reports = [TraceReport(**json.loads(path.read_text("utf-8"))) for path in paths.values() if path.exists()]
        if not reports and not self._alive():
            raise PeerError(message("The run has ended while it was profiled.", hint="take fewer seconds.", run=str(self._folder)))
        reported = {report.who for report in reports}
        reports += [TraceReport(who, problem="it has ended, or did not answer.") for who in self._pids if who not in reported]
        return sorted(reports, key=lambda report: (len(report.who), report.who))

    def _alive(self) -> set[str]:
        return {who for who, pid in self._pids.items() if self._folder.is_dir() and _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def profile_run(run: int, seconds: float, profile_dir: Path | None = None) -> None:
    """Traces all processes of a run on this machine for some seconds, and prints a summary of the traces.

    Args:
        run: The process id of its launcher.
        seconds: The duration, at most 60.
        profile_dir: Folder for the traces. Default: the run's.

    Raises:
        ConfigurationError: There is no such run, or it cannot be profiled now, or an argument is invalid.
        PeerError: The run has ended meanwhile, or no process could trace itself.
    """
    checked(ProfiledSeconds, "seconds", seconds, hint="e.g. 2.")
    folder, own_dir = find_run(run)
    run_folder = new_run_folder(writable_folder(profile_dir or own_dir))
    asked = ProfileRequest(folder, run_folder)
    asked.wait(seconds)
    reports = asked.end()
    write_summary(reports, run_folder)
    show_summary(reports, f"{seconds:g} seconds", run_folder, sys.stdout)
    if all(report.problem for report in reports):
        hint = "see the problem of each process above; one can only be traced once at a time."
        raise PeerError(message("No process of the run could be traced.", hint, run=run))
