"""How far a run is: rank 0 notes it before each step, and its launcher reads it when a rank was lost."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

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
    """The file in which the last step stands.

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
        """Notes a step. The file stays open, so that this takes microseconds."""
        with contextlib.suppress(OSError):  # A full disk. The launcher is then told nothing.
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, _NUMBERS.pack(*step), 0)

    def read(self) -> Step | None:
        """Returns the last step; None if there was none."""
        with contextlib.suppress(OSError, struct.error):
            return Step(*_NUMBERS.unpack(self._path.read_bytes()))
        return None

    def clear(self) -> None:
        """Forgets it."""
        with contextlib.suppress(OSError):  # There is none, or the folder is out of reach for a while.
            self._path.unlink()
