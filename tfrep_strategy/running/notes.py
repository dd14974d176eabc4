"""A rank that fails writes down when and how, before its clean-up makes the other ranks fail too."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.environments import detect_environment

_COLLISIONS = (errno.EEXIST, errno.ENOTEMPTY)
_COLLISIONS_OF_OTHERS = {"FileNotFoundError", "NotFoundError", "AlreadyExistsError", "JSONDecodeError", "IntegrityError"}
"""What ranks get that come to a file after, or while, rank 0 does: half a file, none any more, a row that is there."""

_COLLISION_HINT = """\
Hint: all ranks run this script, so that another rank may have been at {path} at the same moment. Let one rank do it first:
`with tfrep.chief_first():`, or `if tfrep.is_chief():` followed by `tfrep.barrier()`.
"""
_PACKAGE = Path(__file__).parent.parent
_LAUNCHER = str(_PACKAGE / "running")


@dataclass(frozen=True)
class Note:
    """What a failed rank has to say.

    Attributes:
        time: When it failed, on the machine's monotonic clock, which all processes share.
        exit_code: The exit code with which it is about to end.
        traceback: Where Python left its code, and a hint if there is one; empty if it ended by `sys.exit`.
        log_size: How many bytes its log had by then; None if it writes to no file.
    """

    time: float
    exit_code: int
    traceback: str = ""
    log_size: int | None = None


@contextlib.contextmanager
def noted_failure(folder: Path | None, rank: int) -> Iterator[None]:
    """Writes a note if the body raises or exits with another code than 0; the exception goes its way.

    Args:
        folder: Where to write it; nothing is written if there is none, as on a machine that is not the launcher's.
        rank: Who writes it.

    Yields:
        Nothing.

    Example:
        >>> with noted_failure(Path("notes"), rank=1):
        ...     sys.exit(3)
        Traceback (most recent call last):
        SystemExit: 3
    """
    try:
        yield
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code & 0xFF:
            _write(folder, rank, Note(time.monotonic(), code & 0xFF, "", _log_size()))
        raise
    except BaseException as error:
        now, hint = time.monotonic(), _hint(error)
        _write(folder, rank, Note(now, 1, _traceback_of_user(error) + hint, _log_size()))
        if hint:
            _show_after_traceback(hint)
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


def clear_notes(folder: Path) -> None:
    """Removes what ranks wrote, and their signs of life, before they are started again.

    Args:
        folder: Where they wrote it.

    Example:
        >>> clear_notes(Path("empty-folder"))
    """
    for pattern in ("*.note", "*.life"):
        for path in folder.glob(pattern):
            path.unlink()


def _write(folder: Path | None, rank: int, note: Note) -> None:
    if folder is not None and folder.is_dir():
        # The launcher may look at any moment: it sees a whole note or none.
        unfinished = folder / f"{rank}.unfinished"
        unfinished.write_text(json.dumps(asdict(note)), "utf-8")
        os.replace(unfinished, folder / f"{rank}.note")


def _traceback_of_user(error: BaseException) -> str:
    """Formats the traceback from the first frame on that is neither the launcher's nor of what it runs scripts with."""
    frame = error.__traceback__
    while frame is not None and _is_launcher(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _is_launcher(file: str) -> bool:
    folder, name = os.path.split(file)
    return folder == _LAUNCHER or name in ("<frozen runpy>", "runpy.py", "contextlib.py")


def _hint(error: BaseException) -> str:
    collided = isinstance(error, OSError) and error.errno in _COLLISIONS
    environment = detect_environment()
    if not collided and environment.rank:
        collided = not _COLLISIONS_OF_OTHERS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    return _COLLISION_HINT.format(path=_path_of(error)) if collided and environment.size > 1 else ""


def _path_of(error: BaseException) -> str:
    """Finds the file that an error is about: the one that it names, else one that the innermost function with any worked on."""
    if isinstance(error, OSError) and error.filename is not None:
        return str(error.filename)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            name = value.name if isinstance(value, io.IOBase) and hasattr(value, "name") else value
            if isinstance(name, str | os.PathLike) and os.path.isfile(name):
                return os.fspath(name)
    return "the same file"


def _show_after_traceback(hint: str) -> None:
    show = sys.excepthook

    def show_with_hint(*error: Any) -> None:
        show(*error)
        print(hint, end="", file=sys.stderr)

    sys.excepthook = show_with_hint


def _log_size() -> int | None:
    with contextlib.suppress(Exception):  # The script may have closed or replaced them, which must not hide its error.
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.fstat(1)
        return log.st_size if stat.S_ISREG(log.st_mode) else None
    return None
