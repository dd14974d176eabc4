"""Notices between a launcher and the `fit` that it has started: a request to end (SIGTERM), and the progress of the run."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that ends on request."""

_asked = threading.Event()
_is_answered = threading.Event()


@contextlib.contextmanager
def keeping_requests() -> Iterator[None]:
    """Keeps requests to end while the body runs, once `answer_requests_to_end` was called.

    If no request was answered by the end of the body, SIGTERM has its usual effect again. A program's own handler for SIGTERM is
    left in place. Python delivers signals only to the main thread.

    Yields:
        Nothing.
    """
    if not _can_be_kept():
        yield
        return
    signal.signal(signal.SIGTERM, _keep)
    try:
        yield
    finally:
        _is_answered.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _asked.is_set():
            signal.raise_signal(signal.SIGTERM)


def keep_requests() -> None:
    """Keeps requests to end from now on, for a program that calls `is_asked_to_end` itself."""
    if _can_be_kept():
        signal.signal(signal.SIGTERM, _keep)
        _is_answered.set()


def _can_be_kept() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def answer_requests_to_end() -> None:
    """Promises that the caller will check `is_asked_to_end` until the body of `keeping_requests` ends."""
    _is_answered.set()


def is_asked_to_end() -> bool:
    """Returns whether a request has come."""
    return _asked.is_set()


def end_as_asked() -> None:
    """Ends this process.

    Raises:
        SystemExit: Always, with `EXIT_CODE`.
    """
    _asked.clear()
    raise SystemExit(EXIT_CODE)


def _keep(number: int, frame: object) -> None:
    if _is_answered.is_set():  # A second request changes nothing: a scheduler may ask both the launcher and the rank.
        _asked.set()
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


_NAME = "progress"
_NUMBERS = struct.Struct("<3q")


class Step(NamedTuple):
    """A step of a run.

    Attributes:
        fit: The number of the `fit`, from 0.
        epoch: The number of its epoch, from 0.
        batch: The number of the batch, from 0.
    """

    fit: int
    epoch: int
    batch: int


class Progress:
    """The file with the last step.

    Args:
        folder: The folder of the run's backups.

    Example:
        >>> progress = Progress(Path())
        >>> progress.note(Step(fit=0, epoch=2, batch=5))
        >>> progress.read()
        Step(fit=0, epoch=2, batch=5)
        >>> progress.clear()
        >>> progress.read() is None
        True
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._file: int | None = None

    def note(self, step: Step) -> None:
        """Records a step. The file stays open, so that this takes microseconds."""
        with contextlib.suppress(OSError):  # The disk may be full. The launcher then learns nothing.
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, _NUMBERS.pack(*step), 0)

    def read(self) -> Step | None:
        """Returns the last step; None if there was none."""
        with contextlib.suppress(OSError, struct.error):
            return Step(*_NUMBERS.unpack(self._path.read_bytes()))
        return None

    def clear(self) -> None:
        """Removes the file."""
        with contextlib.suppress(OSError):  # There is no file, or the folder is out of reach for a while.
            self._path.unlink()
