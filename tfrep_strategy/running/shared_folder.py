"""The folder of a run's backups, as launchers know it: one that is mounted, or an address such as `gs://bucket/run`.

All machines of a run have to reach it: machine 0 leaves a mark in one that is mounted, for which the others look.
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
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.notices import Progress
from tfrep_strategy.core.validation import made_folder
from tfrep_strategy.errors import ConfigurationError, message

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
            self._remove([name for name in self._names() if name.startswith(_BACKUPS)])

    def _names(self) -> list[str]:
        return os.listdir(self.place)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(Path(self.place, name), ignore_errors=True)


class FolderAtAddress(SharedFolder):
    """A folder at an address, which ranks reach through TensorFlow.

    Args:
        wanted: The address.
    """

    def __init__(self, wanted: str) -> None:
        self.place = wanted.rstrip("/")

    @property
    def progress_dir(self) -> Path:
        """Where rank 0 notes its steps: a folder of its machine, for the time of this process."""
        return _local_folder(self.place)

    def _names(self) -> list[str]:
        return json.loads(self._told("names"))

    def _remove(self, names: Sequence[str]) -> None:
        if names:
            self._told("remove", *names)

    def _told(self, *what: str) -> str:
        """Asks a process that loads TensorFlow, which the launcher does not."""
        command = module_command(__name__, self.place, *what)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout


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
    if is_address(folder.place):  # It is the same for all who name it.
        yield mark
        return
    path = Path(folder.place, _MARK)
    try:
        path.write_text(mark)
    except OSError as error:
        what = f"Nothing can be written to the folder for backups ({error.strerror or error})."
        raise ConfigurationError(message(what, hint="name another one.", backup_dir=folder.place)) from None
    try:
        yield mark
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


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
    if is_address(folder.place):
        return
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            if Path(folder.place, _MARK).read_text() == mark:
                return
        time.sleep(_PAUSE_SECONDS)
    what = f"{who} does not see in the folder for backups what machine 0 has written there."
    hint = "name a folder that all machines share: a run may go on with other machines."
    raise ConfigurationError(message(what, hint=hint, backup_dir=folder.place))


@functools.cache
def _local_folder(address: str) -> Path:
    """Returns a folder of this machine for what belongs to an address; it is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="tfrep-progress-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def main(arguments: list[str], path: list[str]) -> None:
    """Prints the names in a folder at an address as JSON, or removes folders in it. This loads TensorFlow, which reaches addresses.

    Args:
        arguments: The address of the folder, and "names", or "remove" and their names.
        path: The search path with which Python started: file systems may be added to TensorFlow from there.
    """
    sys.path[:] = path
    import tensorflow as tf

    place, what, *names = arguments
    if what == "names":
        print(json.dumps([name.rstrip("/") for name in tf.io.gfile.listdir(place)]))
    for name in names:
        tf.io.gfile.rmtree(f"{place}/{name}")
