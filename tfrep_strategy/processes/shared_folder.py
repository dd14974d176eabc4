"""The folder of a run's backups, as launchers know it: one that is mounted, or an address such as `gs://bucket/run`.

All machines of a run have to reach it: machine 0 leaves a mark in it, for which the others look.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.processes.command import module_command
from tfrep_strategy.progress import Progress
from tfrep_strategy.validation import check_scheme, made_folder

_MARK = ".tfrep-machine-0"
_LOOKS, _PAUSE_SECONDS = 10, 0.3
"""A network's file system may show a new file some time later."""

_BACKUPS = "fit-"
"""How the names of the folders begin in which there is a `fit` each."""


class SharedFolder:
    """A folder that is mounted. It is made if it is missing.

    Args:
        wanted: Its path.

    Attributes:
        place: What ranks are told.

    Raises:
        ConfigurationError: It cannot be made.

    Example:
        >>> SharedFolder("backups").has_backups()
        False
    """

    def __init__(self, wanted: str | os.PathLike[str]) -> None:
        self.place = str(made_folder("backup_dir", wanted))

    @property
    def progress_dir(self) -> Path:
        """Where rank 0 notes its steps: a folder of its machine."""
        return Path(self.place)

    @property
    def progress(self) -> Progress:
        """The steps that rank 0 notes."""
        return Progress(self.progress_dir)

    @property
    def environ(self) -> dict[str, str]:
        """What ranks are told, as environment variables."""
        return {"TFREP_BACKUP_DIR": self.place, "TFREP_PROGRESS_DIR": str(self.progress_dir)}

    def has_backups(self) -> bool:
        """Returns whether a `fit` has been backed up."""
        with contextlib.suppress(OSError):
            return any(name.startswith(_BACKUPS) for name in self._names())
        return False

    def remove_backups(self) -> None:
        """Removes the backups of a run that has ended well."""
        self.progress.clear()
        with contextlib.suppress(OSError):  # It is out of reach for a while.
            for name in self._names():
                if name.startswith(_BACKUPS):
                    self._remove_folder(name)

    def write(self, name: str, text: str) -> None:
        """Writes a file, or raises `OSError`."""
        Path(self.place, name).write_text(text)

    def read(self, name: str) -> str:
        """Reads a file, or raises `OSError`."""
        return Path(self.place, name).read_text()

    def remove(self, name: str) -> None:
        """Removes a file, or raises `OSError`."""
        Path(self.place, name).unlink()

    def _names(self) -> list[str]:
        return os.listdir(self.place)

    def _remove_folder(self, name: str) -> None:
        shutil.rmtree(Path(self.place, name), ignore_errors=True)


class FolderAtAddress(SharedFolder):
    """A folder at an address. TensorFlow reaches it, in a process of its own.

    Args:
        wanted: The address.

    Raises:
        ConfigurationError: It cannot be made.
    """

    def __init__(self, wanted: str) -> None:
        require_file_system(wanted)
        self.place = wanted.rstrip("/")
        try:
            _files().ask("make", self.place)
        except OSError as error:
            hint = "look whether the address is right, can be reached, and whether you may write there."
            raise ConfigurationError(message(f"Cannot make the folder ({error}).", hint=hint, backup_dir=wanted)) from None

    @property
    def progress_dir(self) -> Path:
        """Where rank 0 notes its steps: a folder of its machine, for the time of this process."""
        return _local_folder(self.place)

    def write(self, name: str, text: str) -> None:
        """Writes a file, or raises `OSError`."""
        _files().ask("write", f"{self.place}/{name}", text)

    def read(self, name: str) -> str:
        """Reads a file, or raises `OSError`."""
        return _files().ask("read", f"{self.place}/{name}")

    def remove(self, name: str) -> None:
        """Removes a file, or raises `OSError`."""
        _files().ask("remove", f"{self.place}/{name}")

    def _names(self) -> list[str]:
        return _files().ask("names", self.place)

    def _remove_folder(self, name: str) -> None:
        _files().ask("remove all", f"{self.place}/{name}")


def is_address(wanted: str | os.PathLike[str]) -> bool:
    """Returns whether this is an address, and no path.

    Example:
        >>> is_address("gs://bucket/run"), is_address("/shared/run")
        (True, False)
    """
    return "://" in os.fspath(wanted)


def shared_folder(wanted: str | os.PathLike[str]) -> SharedFolder:
    """Returns the folder for backups, and makes it if it is missing.

    Args:
        wanted: Its path, or an address.

    Raises:
        ConfigurationError: It cannot be made.

    Example:
        >>> Path(shared_folder("backups").place).is_dir()
        True
    """
    return FolderAtAddress(os.fspath(wanted)) if is_address(wanted) else SharedFolder(wanted)


def require_file_system(address: str) -> None:
    """Refuses addresses for which TensorFlow has no file system. To ask it takes some seconds, once.

    Raises:
        ConfigurationError: It has none.
    """
    check_scheme(address, _files().ask("schemes"))


@contextlib.contextmanager
def marked(folder: SharedFolder) -> Iterator[str]:
    """Keeps a mark in a folder while the body runs.

    Args:
        folder: The folder.

    Yields:
        What the others must find there.

    Raises:
        ConfigurationError: Nothing can be written there.

    Example:
        >>> with marked(SharedFolder("backups")) as mark:
        ...     check_reached(SharedFolder("backups"), mark, "This machine")
    """
    mark = secrets.token_hex(16)
    try:
        folder.write(_MARK, mark)
    except OSError as error:
        what = f"Nothing can be written to the folder for backups ({error.strerror or error})."
        raise ConfigurationError(message(what, hint="name another one.", backup_dir=folder.place)) from None
    try:
        yield mark
    finally:
        with contextlib.suppress(OSError):
            folder.remove(_MARK)


def check_reached(folder: SharedFolder, mark: str, who: str) -> None:
    """Refuses a folder in which the mark of machine 0 is not found.

    Args:
        folder: The folder, as this machine knows it.
        mark: What machine 0 has left there.
        who: This machine, for the message.

    Raises:
        ConfigurationError: It is not there.

    Example:
        >>> check_reached(SharedFolder("elsewhere"), "0f", "host2")
        Traceback (most recent call last):
        tfrep_strategy.errors.ConfigurationError: host2 does not see in the folder for backups what machine 0 has written there. ...
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            if folder.read(_MARK) == mark:
                return
        time.sleep(_PAUSE_SECONDS)
    what = f"{who} does not see in the folder for backups what machine 0 has written there."
    hint = "name a folder that all machines share: a run may go on with other machines."
    raise ConfigurationError(message(what, hint=hint, backup_dir=folder.place))


class _FilesAtAddresses:
    """The process that reaches them. It ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            module_command("tfrep_strategy.tensorflow_integration.remote_files"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # It serves until this process has ended, whoever is interrupted.
        )
        self._lock = threading.Lock()
        atexit.register(self._end)

    def ask(self, *question: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            answer = json.loads(self._process.stdout.readline() or '{"error": "TensorFlow could not be loaded"}')
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["result"]

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@functools.cache
def _files() -> _FilesAtAddresses:
    return _FilesAtAddresses()


@functools.cache
def _local_folder(address: str) -> Path:
    """Returns a folder of this machine for what belongs to an address; it is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="tfrep-progress-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
