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
from tfrep_strategy.core.limits import is_debugging
from tfrep_strategy.core.out_of_memory import note_out_of_memory

_COLLISIONS = (errno.EEXIST, errno.ENOTEMPTY)
_COLLISIONS_OF_OTHERS = {"FileNotFoundError", "NotFoundError", "AlreadyExistsError", "JSONDecodeError", "IntegrityError"}
"""What ranks get that come to a file after, or while, rank 0 does: half a file, none any more, a row that is there."""

_COLLISION_HINT = """\
Hint: all ranks run this script, so that another rank may have been at {path} at the same moment. Let one rank do it first:
`with tfrep.chief_first():`, or `if tfrep.is_chief():` followed by `tfrep.barrier()`.
"""
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_AROUND = ("<frozen ", f"{os.sep}runpy.py", f"{os.sep}contextlib.py", f"{os.sep}traceback_utils.py")
"""Where frames lie through which every call of a script, of Keras or of TensorFlow goes."""


@dataclass(frozen=True)
class Note:
    """The report of a failed rank.

    Attributes:
        time: When it failed, on the machine's monotonic clock, which all processes share.
        exit_code: The exit code with which it is about to end.
        traceback: Where Python left its code, and a hint if there is one; empty if it ended by `sys.exit`.
        log_size: How many bytes its log had by then; None if it writes to no file.
        error: The name of the exception's class; empty if it ended by `sys.exit`.
    """

    time: float
    exit_code: int
    traceback: str = ""
    log_size: int | None = None
    error: str = ""


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
        note_out_of_memory(error)
        shown = _traceback_of_user(error)
        _write(folder, rank, Note(now, 1, shown + hint, _log_size(), type(error).__name__))
        _show(shown, hint)
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
    """Formats the traceback without the frames of this package and of what calls the script. `TFREP_DEBUG=1` keeps all."""
    shown = traceback.TracebackException.from_exception(error)
    if not is_debugging():
        _leave_out_inner_frames(shown)
    return "".join(shown.format())


def _leave_out_inner_frames(shown: traceback.TracebackException) -> None:
    kept = [frame for frame in shown.stack if not _is_inner(frame.filename)]
    # An error without a frame of the script is shown as it is, but for a SyntaxError, which says where it is.
    if kept or hasattr(shown, "filename"):
        shown.stack = traceback.StackSummary.from_list(kept)
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            _leave_out_inner_frames(other)


def _is_inner(file: str) -> bool:
    return file.startswith((_PACKAGE, *_AROUND)) or file.endswith(_AROUND)


def _hint(error: BaseException) -> str:
    environment = detect_environment()
    cause: BaseException | None = error
    while cause is not None and not _has_collided(cause, environment.rank):
        cause = cause.__cause__  # Packages raise errors of their own from those of files.
    return _COLLISION_HINT.format(path=_path_of(cause)) if cause is not None and environment.size > 1 else ""


def _has_collided(error: BaseException, rank: int) -> bool:
    if isinstance(error, OSError) and error.errno in _COLLISIONS:
        return True
    return rank > 0 and not _COLLISIONS_OF_OTHERS.isdisjoint(kind.__name__ for kind in type(error).__mro__)


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


def _show(traceback_of_user: str, hint: str) -> None:
    """Has Python show this in the place of the whole traceback. A hook of the script's own shows the error as it likes."""
    show = sys.excepthook

    def show_with_hint(*error: Any) -> None:
        if show is sys.__excepthook__:
            print(traceback_of_user, end="", file=sys.stderr)
        else:
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
