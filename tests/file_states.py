"""The states that a kill may leave of files, and copies of this process, which may be killed or may not write much."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 60.0
_CHANGES_FILES = {
    *("chmod", "ftruncate", "fsync", "link", "mkdir", "open", "remove", "rename", "replace", "rmdir", "sendfile"),
    *("truncate", "unlink", "write", "writelines", "writestr"),
}
"""Functions of C after whose names one of Python's calls that change files can be told."""

_OF_HDF5 = {"close", "create_dataset", "create_group", "flush"}


class Watching:
    """Calls a function before each call that may change a file, of Python or of h5py, on this thread and those that it starts.

    Of writes that follow each other, such as HDF5's many small ones, the first one counts.
    """

    def __init__(self, at_point: Callable[[], None]) -> None:
        self._at_point, self._last = at_point, ""

    def __enter__(self) -> None:
        threading.setprofile(self._called)  # Of threads that start now.
        sys.setprofile(self._called)

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        name = getattr(argument, "__name__", "") if event == "c_call" else frame.f_code.co_name
        if event == "c_call":
            counts = name in _CHANGES_FILES
        else:
            counts = event == "call" and name in _OF_HDF5 and "h5py" in frame.f_code.co_filename
        if counts and not name == self._last == "write":
            self._at_point()
        self._last = name if counts else self._last


def states_while(work: Callable[[], Any], folder: Path, copies: Path) -> list[Path]:
    """Copies a folder before each call that may change it: what a kill there would leave.

    What a process has in its own buffers is in neither.

    Args:
        work: Changes the folder.
        folder: The folder.
        copies: Where to put the copies.

    Returns:
        The copies that differ in more than hidden folders.
    """
    found: list[Path] = []
    known = set()

    def note() -> None:
        visible = frozenset(contents(folder).items())
        if visible not in known:
            known.add(visible)
            found.append(copies / str(len(found)))
            shutil.copytree(folder, found[-1], symlinks=True)

    with Watching(note):
        work()
    note()
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Reads all files below a folder, but for those in hidden folders."""
    files = [path for path in folder.rglob("*") if ".tfrep-" not in str(path) and path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def hidden(folder: Path) -> list[Path]:
    """Lists what is not finished in a folder."""
    return list(folder.rglob(".tfrep-*"))


def in_copy(work: Callable[[], Any], scratch: Path, killed_at: int | None = None) -> tuple[int, Any]:
    """Calls a function in a copy of this process.

    Args:
        work: The function.
        scratch: A folder in which the copy leaves its answer.
        killed_at: Before how many calls that may change a file the copy is killed; None: it is not.

    Returns:
        The signal that has ended it, or 0, and what it has returned or raised.
    """
    answer = scratch / "answer"
    answer.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            gc.freeze()  # TensorFlow's objects of earlier tests cannot be freed here.
            result = _outcome(work, killed_at)
            gc.collect()  # HDF5 must not end Python when its own are freed.
            limit_files(resource.RLIM_INFINITY)
            answer.write_bytes(pickle.dumps(result))
        finally:
            os._exit(0)
    deadline = time.monotonic() + _SECONDS
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended:
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise TimeoutError("The copy of this process has not ended.")
        time.sleep(0.002)
        ended, status = os.waitpid(process, os.WNOHANG)
    return os.WTERMSIG(status), pickle.loads(answer.read_bytes()) if answer.exists() else None


def _outcome(work: Callable[[], Any], killed_at: int | None) -> Any:
    left = killed_at

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left = None if left is None else left - 1

    try:
        with Watching(count):
            return work()
    except BaseException as error:
        return error.with_traceback(None)


def limit_files(num_bytes: int) -> None:
    """Limits how large a file this process may write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
