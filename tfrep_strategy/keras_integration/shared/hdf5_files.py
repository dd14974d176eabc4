"""HDF5 writes through a file of Python, so that a full disk is an error.

HDF5 cannot close a file that it cannot write: it leaves an object that ends Python with SIGSEGV when it is touched or freed. So
HDF5 never hears of a failure; the error is raised when HDF5 is done.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import h5py

from tfrep_strategy.keras_integration.settings import Setting


class _PythonFile:
    """What HDF5 reads and writes. After the first failure, writes are dropped.

    Args:
        path: The file.
        is_new: Whether to begin with an empty one.
    """

    def __init__(self, path: str, is_new: bool) -> None:
        self._file = open(path, "w+b" if is_new else "r+b", buffering=0)  # noqa: SIM115  (HDF5 has buffers of its own)
        self.error: OSError | None = None

    def finish(self) -> None:
        """Closes the file. HDF5 may still write to this object, when Python frees the objects of a save that has failed."""
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
        """Has nothing to do: nothing is buffered."""

    @property
    def _is_broken(self) -> bool:
        return self._file.closed or self.error is not None


class _File(h5py.File):
    """Has the name of the file that a `_PythonFile` writes: Keras notes it, and tells from its ending what to write there."""

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
    """Has HDF5 write through Python in the block.

    Raises:
        OSError: A file could not be written; raised at the end of the block.
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
        mode: "w" for a new file, "a" for one to which more is added.

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
