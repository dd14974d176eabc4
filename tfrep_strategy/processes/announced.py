"""Which runs are running on this machine: each launcher writes a file beside the logs, and keeps it open while its run lasts."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tfrep_strategy.errors import ConfigurationError, message

_NAME = "tfrep-run.json"


@dataclass(frozen=True)
class Announced:
    """What a launcher tells of its run.

    Attributes:
        pid: Of the launcher.
        created: When that process was created, in seconds since the epoch: process ids are used again.
        log_dir: Folder of the logs.
        note_dir: Folder in which processes of the run are asked.
        profile_dir: Folder for traces of the run.
    """

    pid: int
    created: float
    log_dir: str
    note_dir: str
    profile_dir: str

    @property
    def is_running(self) -> bool:
        """Whether the launcher still runs."""
        try:
            return psutil.Process(self.pid).create_time() == self.created and Path(self.note_dir).is_dir()
        except psutil.Error:
            return False


@contextlib.contextmanager
def announced(log_dir: Path, note_dir: Path, profile_dir: Path) -> Iterator[None]:
    """Tells other processes of the same user that a run is running, as long as the body runs.

    Args:
        log_dir: Folder of the logs.
        note_dir: Folder in which processes of the run are asked.
        profile_dir: Folder for traces of the run.

    Yields:
        Nothing.

    Example:
        >>> with announced(Path(), Path(), Path("profile")):
        ...     find_run(str(os.getpid())).profile_dir
        'profile'
    """
    told = Announced(os.getpid(), psutil.Process().create_time(), str(log_dir.absolute()), str(note_dir), str(profile_dir))
    path = log_dir.absolute() / _NAME
    descriptor, unfinished = tempfile.mkstemp(dir=log_dir, prefix=f".{_NAME}-")  # Mode 600.
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(told), file)
        file.flush()
        os.replace(unfinished, path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # The folder is gone.
                if os.path.samestat(path.stat(), os.fstat(descriptor)):  # Else another run writes its logs there.
                    path.unlink()


def find_run(run: str) -> Announced:
    """Finds a run of this user that is running on this machine.

    Args:
        run: The folder of its logs, or the process id of its launcher.

    Returns:
        What its launcher tells.

    Raises:
        ConfigurationError: There is none.

    Example:
        >>> find_run("no-such-folder")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: There is no such folder. Received: run='no-such-folder'...
    """
    if run.isdecimal():
        found = _of_launcher(int(run)) if len(run) < 10 else None
        if found is not None:
            return found
        raise _refusal("This process starts no run now: it has ended, is of another user, or is no launcher", run)
    path = Path(run) / _NAME
    if not Path(run).is_dir():
        raise _refusal("There is no such folder", run)
    if not path.exists():
        raise _refusal("The run of this folder has ended, or the folder is not that of a run's logs", run)
    found = _read(path)
    if found is None:
        raise _refusal("The run of this folder is of another user", run)
    if not found.is_running:
        raise _refusal("The run of this folder has ended", run)
    return found


def _refusal(what: str, run: str) -> ConfigurationError:
    running = [told for pid in psutil.pids() if (told := _of_launcher(pid)) is not None]
    shown = "; ".join(f"process {told.pid} (logs: {told.log_dir})" for told in running)
    hint = f"name one that is running: {shown}." if running else "name the --log-dir of a run that is running. None is now."
    return ConfigurationError(message(f"{what}.", hint=hint, run=run))


def _of_launcher(pid: int) -> Announced | None:
    with contextlib.suppress(psutil.Error, OSError):
        for file in psutil.Process(pid).open_files():
            if os.path.basename(file.path) == _NAME and (told := _read(Path(file.path))) is not None and told.pid == pid:
                return told if told.is_running else None
    return None


def _read(path: Path) -> Announced | None:
    """Reads what a launcher of this user has written. Another user may have written anything."""
    try:
        if path.stat().st_uid == os.geteuid():
            return Announced(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    return None
