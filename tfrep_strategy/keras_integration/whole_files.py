"""Files that are complete or absent: a file is written beside its place, brought to the disk, and then moved there.

If a process is killed or a disk is full, the previous file stays.

HDF5 cannot close a file that it cannot write: it leaves an object that ends Python with SIGSEGV when it is touched or freed. So
HDF5 writes through a Python file that hides failures from it. The error is raised when HDF5 is done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import inspect
import logging
import os
import re
import resource
import shutil
import socket
import stat
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import h5py

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.errors import message, warn
from tfrep_strategy.keras_integration.internals import keras_config

_LAST = ("config.json", "saved_model.pb")
"""Files that readers of a folder look for. They are moved last."""

_FULL = {errno.ENOSPC: "The disk is full", errno.EDQUOT: "The quota is used up", errno.EFBIG: "The file is too large"}
_NAME = re.compile(r"\.tfrep-(\d+)-[^@]*@(.*)")
_own_folders: set[str] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], num_bytes: int = 0, largest: int | None = None, parents: bool = False) -> Iterator[str]:
    """Yields a path to write to. The file, or the files, get their names after the block.

    The path has the requested name, in a hidden folder on the same file system. Several files are moved one after
    the other, the requested one last. A new folder is moved at once; an existing one keeps its other
    files. A link stays a link, and an existing file keeps its mode and owner.

    Args:
        path: The path of the file or folder.
        num_bytes: A lower bound of its size in bytes. The free space is checked before anything is written.
        largest: The largest number of bytes in one file; None: all.
        parents: Whether to make its parent folder.

    Yields:
        The path to write to.

    Raises:
        OSError: There is not enough space, or the file cannot be written. Existing files are unchanged.

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
    """Makes a folder for unfinished files, and removes it after the block, with folders left by killed processes.

    Args:
        parent: The parent folder.

    Yields:
        The path of the folder.
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
    """Refuses a file that is too large.

    Args:
        path: The file; its folder exists.
        num_bytes: Number of bytes to write.
        largest: The largest number of bytes in one file; None: all.

    Raises:
        OSError: `ENOSPC`: the file system lacks the space. `EFBIG`: the process may not write a file of that size.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = num_bytes if largest is None else min(num_bytes, largest)
    if limit != resource.RLIM_INFINITY and largest > limit:
        text = "The file would be larger than this process may write, and nothing was written."
        hint = "raise the limit (ulimit -f), or write several files (max_shard_size)."
        raise OSError(errno.EFBIG, message(text, hint, path=_asked_for(path), num_bytes=largest, limit=limit))
    system = os.statvfs(os.path.dirname(path))
    free = (system.f_bavail if os.geteuid() else system.f_bfree) * system.f_frsize
    if system.f_blocks and num_bytes > free:  # Some file systems do not report their space.
        text = "The disk has not enough free space, and nothing was written."
        hint = "free some, or write elsewhere. A file that exists is kept until the new one is complete, so both need space."
        raise OSError(errno.ENOSPC, message(text, hint, path=_asked_for(path), num_bytes=num_bytes, free=free))


def synchronize(path: str) -> None:
    """Returns when a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):  # Some file systems cannot synchronize folders.
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
        text = f"{_FULL[error.errno]}. The file that was there is unchanged."
        hint = "free some space, raise the limit of this process, or write elsewhere."
        raise OSError(error.errno, message(text, hint, path=_asked_for(path))) from error


def _asked_for(path: str) -> str:
    """Returns the final path of a file in a hidden folder."""
    return os.path.join("/", *(part for part in path.split(os.sep) if not _NAME.fullmatch(part)))


def _move_all(unfinished: str, path: str) -> None:
    """Moves the content of a hidden folder beside `path`, the requested file last."""
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
    """Moves a folder at once; returns whether this was possible. Only an empty folder is replaced."""
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
        if error.errno != errno.EXDEV:  # The link leads to another file system.
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
        return _is_locked(folder)  # The process may be in a container, where others cannot see it.
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


class _PythonFile:
    """A Python file for HDF5. After the first failure, writes are dropped.

    Args:
        path: The file.
        is_new: Whether to start with an empty file.
    """

    def __init__(self, path: str, is_new: bool) -> None:
        self._file = open(path, "w+b" if is_new else "r+b", buffering=0)  # noqa: SIM115  (HDF5 has its own buffers)
        self.error: OSError | None = None

    def finish(self) -> None:
        """Closes the file. HDF5 may still write to this object when Python frees the objects of a failed save."""
        self._file.close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return 0 if self._file.closed else self._file.seek(offset, whence)

    def tell(self) -> int:
        return 0 if self._file.closed else self._file.tell()

    def read(self, size: int = -1) -> bytes:
        return b"" if self._file.closed else self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        return 0 if self._file.closed else self._file.readinto(buffer)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        while view and not self._is_broken:
            try:
                view = view[self._file.write(view) :]
            except OSError as error:
                self.error = error
        return len(data)

    def truncate(self, size: int) -> int:
        if not self._is_broken:
            try:
                self._file.truncate(size)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    @property
    def _is_broken(self) -> bool:
        return self._file.closed or self.error is not None


class _File(h5py.File):
    """Shows the name of the file behind a `_PythonFile`: Keras stores the name, and derives the format from its ending."""

    def __init__(self, file: _PythonFile, mode: str, path: str) -> None:
        self._path = path
        super().__init__(file, mode)

    @property
    def filename(self) -> str:
        return self._path

    def __str__(self) -> str:
        return self._path


_written: Setting[list[_PythonFile] | None] = Setting(None)


@contextlib.contextmanager
def raising_errors() -> Iterator[None]:
    """Makes HDF5 write through Python in the block.

    Raises:
        OSError: A file could not be written. Raised at the end of the block.
    """
    files: list[_PythonFile] = []
    with _written.to(files), contextlib.ExitStack() as stack:
        stack.callback(_finish, files)
        try:
            yield
        except Exception as consequence:
            _raise_first(files, consequence)
            raise
        _raise_first(files, None)


def _finish(files: list[_PythonFile]) -> None:
    for file in files:
        file.finish()


def _raise_first(files: list[_PythonFile], consequence: Exception | None) -> None:
    for file in files:
        if file.error is not None:
            raise file.error from consequence


def open_to_write(path: str | os.PathLike[str], mode: str = "w") -> h5py.File:
    """Opens an HDF5 file in a block of `raising_errors`.

    Args:
        path: The file.
        mode: "w" for a new file, "a" to add to one.

    Returns:
        The file.
    """
    files = _written.value
    assert files is not None, "outside of `raising_errors`"
    file = _PythonFile(os.fspath(path), mode == "w")
    files.append(file)
    return _File(file, "w" if mode == "w" else "r+", os.fspath(path))


def open_of_store(original: Any, store: Any, path_or_io: Any, mode: str | None = None) -> Any:
    """Opens the file of Keras's store of variables."""
    writes = (mode or store.mode) in ("w", "a") and _written.value is not None
    if writes and not store.archive and isinstance(path_or_io, (str, os.PathLike)):
        return open_to_write(path_or_io, mode or store.mode)
    return original(store, path_or_io, mode)


_SECONDS = 3600

_draws_bars: Callable[[], bool] = lambda: True  # noqa: E731


def draw_bars_where(is_first: Callable[[], bool]) -> None:
    """Sets the process that draws the bars of downloads; `is_first` is called before each."""
    global _draws_bars
    _draws_bars = is_first


def _destination(arguments: dict[str, Any]) -> str:
    """Returns a key that is equal for downloads that touch the same files: their folder and the name without its endings."""
    folder = os.path.expanduser(arguments.get("cache_dir") or keras_config.keras_home())
    if not os.access(folder, os.W_OK):
        folder = ""  # Keras uses one folder for all of these.
    name = os.path.basename(os.fspath(arguments.get("fname") or urllib.parse.urlsplit(arguments["origin"]).path))
    return os.path.join(os.path.realpath(os.path.join(folder, arguments.get("cache_subdir", "datasets"))), name.split(".")[0])


def get_file_once(get_file: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets one process of this machine work on a file at a time; the next process finds the file."""
    arguments = inspect.signature(get_file).bind(*args, **kwargs).arguments
    if arguments.get("origin") is None:
        return get_file(*args, **kwargs)  # Keras reports the missing argument.
    wanted = hashlib.sha256(_destination(arguments).encode()).hexdigest()[:16]
    # The name has the user's id, since another user could not open the file.
    lock = os.path.join(tempfile.gettempdir(), f"tfrep-download-{os.getuid()}-{wanted}.lock")
    with filelock.FileLock(lock, timeout=_SECONDS):
        return get_file(*args, **kwargs)


def download_whole(original: Any, url: str, filename: str, reporthook: Any = None, data: Any = None) -> Any:
    """Gives a file its name when it is complete, since another process may be reading an older one. One process draws a bar."""
    part = f"{filename}.{os.getpid()}.part"
    try:
        result = original(url, part, reporthook if _draws_bars() else None, data)
        os.replace(part, filename)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
    return filename, result[1]


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike[str], num_bytes: int = 0, largest: int | None = None, parents: bool = False
) -> Iterator[str]:
    """Does the same as `whole` for files of Keras. A full disk is an error in HDF5 as well, and errors show the requested path.

    Args:
        path: See `whole`.
        num_bytes: See `whole`.
        largest: See `whole`.
        parents: See `whole`.

    Yields:
        The path that Keras writes to.
    """
    with whole(path, num_bytes, largest, parents) as unfinished:
        try:
            with raising_errors():
                yield unfinished
        except Exception as error:
            error.args = tuple(arg.replace(unfinished, os.fspath(path)) if isinstance(arg, str) else arg for arg in error.args)
            raise


@contextlib.contextmanager
def shown_as(unfinished: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes Keras and TensorFlow print and log the requested path instead of the one that they write to.

    Args:
        unfinished: The path that they write to.
        path: The final path.
    """
    names = unfinished, os.fspath(path)

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(*names), ()
        return True

    loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
    stream: Any = _Renaming(sys.stdout, names)
    for logger in loggers:
        logger.addFilter(rename)
    try:
        with contextlib.redirect_stdout(stream):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(rename)


class _Renaming:
    """A stream that shows one path as another."""

    def __init__(self, stream: Any, names: tuple[str, str]) -> None:
        self._stream, self._names = stream, names

    def write(self, text: str) -> int:
        return self._stream.write(text.replace(*self._names))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
