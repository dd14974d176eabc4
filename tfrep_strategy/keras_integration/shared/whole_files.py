"""A file has its name once it is complete: it is written beside its place, brought to the disk, and moved there.

A process that is killed, or a disk that is full, leaves the file that was there before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator

from tfrep_strategy.errors import message, warn

_LAST = ("config.json", "saved_model.pb")
"""Of a folder, the files that readers look for: they are moved when the others are there."""

_FULL = {errno.ENOSPC: "The disk is full", errno.EDQUOT: "The quota is used up", errno.EFBIG: "The file is too large"}
_NAME = re.compile(r"\.tfrep-(\d+)-[^@]*@(.*)")
_own_folders: set[str] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], num_bytes: int = 0, largest: int | None = None, parents: bool = False) -> Iterator[str]:
    """Gives a path to write to. What was written there, one file or several, has its name after the block.

    The given path has the name that was asked for, in a hidden folder on the same file system. Several files are moved one after
    the other, and the one that was asked for comes last. A folder that is new is moved at once; one that exists keeps its other
    files. A link stays a link, and a file that exists keeps its mode and owner.

    Args:
        path: Where the file, or the folder, is to be.
        num_bytes: How many bytes it has at least; the space is asked for before anything is written.
        largest: How many of them at most are in one file; None: all.
        parents: Whether to make the folder that it is in.

    Yields:
        Where to write.

    Raises:
        OSError: There is not enough space, or the file cannot be written. What was there is as it was.

    Example:
        >>> with whole("notes.txt") as unfinished:
        ...     written = Path(unfinished).write_text("all or nothing")
        >>> Path("notes.txt").read_text()
        'all or nothing'
    """
    path = os.path.abspath(os.fspath(path))
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if parents:
        os.makedirs(folder, exist_ok=True)
    if not os.path.isdir(folder):
        code = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
        raise OSError(code, os.strerror(code), path)
    exists, is_file = os.path.exists(target), os.path.isfile(target)
    if exists and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    require_space(target, num_bytes, largest)
    with _naming_full_disks(path):
        if exists and not is_file and not os.path.isdir(target):
            yield path  # A device or a pipe.
        elif not os.access(folder, os.W_OK | os.X_OK):
            if not is_file:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            text = "Nothing can be written beside this file, so it is overwritten in place. A kill would leave half of it."
            warn(message(text, path=path))
            yield path
        else:
            with hidden_folder(folder) as unfinished:
                yield os.path.join(unfinished, os.path.basename(path))
                _move_all(unfinished, path)


@contextlib.contextmanager
def hidden_folder(parent: str) -> Iterator[str]:
    """Makes a folder for what is not finished, and removes it after the block, with those that killed processes have left.

    Args:
        parent: In which folder.

    Yields:
        Its path.
    """
    with _lock:
        _remove_abandoned(parent)
        folder = tempfile.mkdtemp(prefix=f".tfrep-{os.getpid()}-", suffix=f"@{socket.gethostname()}", dir=parent)
        _own_folders.add(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # Some network file systems cannot lock folders.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        _own_folders.discard(folder)


def require_space(path: str, num_bytes: int, largest: int | None = None) -> None:
    """Refuses what cannot be written.

    Args:
        path: The file; its folder exists.
        num_bytes: How many bytes are to be written.
        largest: How many of them at most are in one file; None: all.

    Raises:
        OSError: `ENOSPC`: the file system has not so much space. `EFBIG`: the process may not write so large a file.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = num_bytes if largest is None else min(num_bytes, largest)
    if limit != resource.RLIM_INFINITY and largest > limit:
        text = "The file would be larger than this process may write, and nothing was written."
        hint = "raise the limit (ulimit -f), or write several files (max_shard_size)."
        raise OSError(errno.EFBIG, message(text, hint, path=_asked_for(path), num_bytes=largest, limit=limit))
    system = os.statvfs(os.path.dirname(path))
    free = (system.f_bavail if os.geteuid() else system.f_bfree) * system.f_frsize
    if system.f_blocks and num_bytes > free:  # Some file systems tell nothing.
        text = "The disk has not enough free space, and nothing was written."
        hint = "free some, or write elsewhere. A file that exists is kept until the new one is complete, so both need space."
        raise OSError(errno.ENOSPC, message(text, hint, path=_asked_for(path), num_bytes=num_bytes, free=free))


def synchronize(path: str) -> None:
    """Returns when a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):  # Some file systems cannot do it for folders.
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming_full_disks(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        text = f"{_FULL[error.errno]}. What was there is as it was."
        hint = "free some space, raise the limit of this process, or write elsewhere."
        raise OSError(error.errno, message(text, hint, path=_asked_for(path))) from error


def _asked_for(path: str) -> str:
    """Returns the path that a file is to have which is written to a hidden folder."""
    return os.path.join("/", *(part for part in path.split(os.sep) if not _NAME.fullmatch(part)))


def _move_all(unfinished: str, path: str) -> None:
    """Moves what is in a hidden folder beside `path`: first the files, then the one that was asked for."""
    files = []
    for folder, _, names in os.walk(unfinished, topdown=False):
        files += [os.path.join(folder, name) for name in names]
        for name in names:
            synchronize(os.path.join(folder, name))
        synchronize(folder)
    place = os.path.dirname(path)
    main = os.path.join(unfinished, os.path.basename(path))
    if os.path.isdir(main) and _move_folder(main, os.path.realpath(path)):
        files = [file for file in files if not file.startswith(os.path.join(main, ""))]
    files.sort(key=lambda file: (file == main or file.endswith(".json"), file.endswith(_LAST)))
    changed = {os.path.dirname(os.path.realpath(path))}
    for file in files:
        target = os.path.realpath(os.path.join(place, os.path.relpath(file, unfinished)))
        changed.add(os.path.dirname(target))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _move_file(file, target)
    for folder in changed:
        synchronize(folder)


def _move_folder(folder: str, target: str) -> bool:
    """Moves a folder at once; returns whether that could be done: no other folder is replaced unless it is empty."""
    try:
        if os.path.exists(target):
            os.chmod(folder, stat.S_IMODE(os.stat(target).st_mode))
        os.rename(folder, target)
    except OSError:
        return False
    return True


def _move_file(file: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(target)
        with contextlib.suppress(PermissionError):
            os.chown(file, old.st_uid, old.st_gid)
        os.chmod(file, stat.S_IMODE(old.st_mode))
    try:
        os.replace(file, target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # A link that leads to another file system.
            raise
        with whole(target) as unfinished:
            shutil.copyfile(file, unfinished)


def _remove_abandoned(parent: str) -> None:
    """Removes the hidden folders of processes of this machine that have ended."""
    for name in os.listdir(parent):
        found = _NAME.fullmatch(name)
        if found and found[2] == socket.gethostname() and not _is_used(os.path.join(parent, name), int(found[1])):
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _is_used(folder: str, process: int) -> bool:
    if process == os.getpid():  # An earlier process may have had the same number.
        return folder in _own_folders
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return _is_locked(folder)  # A container of this machine has processes that others cannot see.
    except (PermissionError, OverflowError):
        return True
    return True


def _is_locked(folder: str) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # Another process has removed it.
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
