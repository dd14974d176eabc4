"""A folder that all machines of a run have to reach: machine 0 leaves a mark in it, for which the others look."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.validation import made_folder

_NAME = ".tfrep-machine-0"
_LOOKS, _PAUSE_SECONDS = 10, 0.3
"""A network's file system may show a new file some time later."""


@contextlib.contextmanager
def marked(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Keeps a mark in a folder while the body runs.

    Args:
        folder: The folder. It is made if it is missing.

    Yields:
        What the others must find there.

    Raises:
        ConfigurationError: The folder cannot be made, or nothing can be written there.

    Example:
        >>> with marked("backups") as mark:
        ...     check_reached("backups", mark, "This machine")
    """
    path, mark = made_folder("backup_dir", folder) / _NAME, secrets.token_hex(16)
    try:
        path.write_text(mark)
    except OSError as error:
        what = f"Nothing can be written to the folder for backups ({error.strerror})."
        raise ConfigurationError(message(what, hint="name another one.", backup_dir=os.fspath(folder))) from None
    try:
        yield mark
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def check_reached(folder: str | os.PathLike[str], mark: str, who: str) -> None:
    """Refuses a folder in which the mark of machine 0 is not found.

    Args:
        folder: The folder, as this machine knows it.
        mark: What machine 0 has left there.
        who: This machine, for the message.

    Raises:
        ConfigurationError: It is not there.

    Example:
        >>> check_reached("elsewhere", "0f", "host2")
        Traceback (most recent call last):
        tfrep_strategy.errors.ConfigurationError: host2 does not see in the folder for backups what machine 0 has written there. ...
    """
    path = Path(folder, _NAME)
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            if path.read_text() == mark:
                return
        time.sleep(_PAUSE_SECONDS)
    what = f"{who} does not see in the folder for backups what machine 0 has written there."
    hint = "name a folder that all machines share: a run may go on with other machines."
    raise ConfigurationError(message(what, hint=hint, backup_dir=os.fspath(folder)))
