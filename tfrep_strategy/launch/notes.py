"""A rank that fails writes down when and how, before its clean-up makes the other ranks fail too."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """What a failed rank has to say.

    Attributes:
        time: When it failed, on the machine's monotonic clock, which all processes share.
        exit_code: The exit code with which it is about to end.
        traceback: Where Python left its code; empty if it ended by `sys.exit`.
    """

    time: float
    exit_code: int
    traceback: str = ""


@contextlib.contextmanager
def noted_failure(folder: Path, rank: int) -> Iterator[None]:
    """Writes a note if the body raises or exits with another code than 0; the exception goes its way.

    Args:
        folder: Where to write it; nothing is written if it does not exist, as on a machine that is not the launcher's.
        rank: Who writes it.

    Yields:
        Nothing.

    Example:
        >>> with noted_failure(Path("notes"), rank=1):
        ...     sys.exit(3)
    """
    try:
        yield
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code & 0xFF:
            _write(folder, rank, Note(time.monotonic(), code & 0xFF))
        raise
    except BaseException:
        _write(folder, rank, Note(time.monotonic(), 1, traceback.format_exc()))
        raise


def read_notes(folder: Path) -> dict[int, Note]:
    """Reads what ranks wrote.

    Args:
        folder: Where they would have written.

    Returns:
        The notes, by rank.

    Example:
        >>> read_notes(Path("empty-folder"))
        {}
    """
    return {int(path.stem): Note(**json.loads(path.read_text("utf-8"))) for path in folder.glob("*.note")}


def _write(folder: Path, rank: int, note: Note) -> None:
    if folder.is_dir():
        # The launcher may look at any moment: it sees a whole note or none.
        unfinished = folder / f"{rank}.unfinished"
        unfinished.write_text(json.dumps(asdict(note)), "utf-8")
        os.replace(unfinished, folder / f"{rank}.note")
