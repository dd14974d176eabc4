"""Files that Keras writes: nobody finds the half of one, neither after a kill nor in another process of the machine."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import filelock

from tfrep_strategy.keras_integration.internals import keras_config
from tfrep_strategy.keras_integration.shared.hdf5_files import raising_errors
from tfrep_strategy.keras_integration.shared.whole_files import whole

_SECONDS = 3600

_draws_bars: Callable[[], bool] = lambda: True  # noqa: E731


def draw_bars_where(is_first: Callable[[], bool]) -> None:
    """Says which process draws the bars of downloads; `is_first` is called before each."""
    global _draws_bars
    _draws_bars = is_first


def _destination(arguments: dict[str, Any]) -> str:
    """Returns what all downloads that touch the same files have in common: their folder and the name without its endings."""
    folder = os.path.expanduser(arguments.get("cache_dir") or keras_config.keras_home())
    if not os.access(folder, os.W_OK):
        folder = ""  # Keras takes one for all of these.
    name = os.path.basename(os.fspath(arguments.get("fname") or urllib.parse.urlsplit(arguments["origin"]).path))
    return os.path.join(os.path.realpath(os.path.join(folder, arguments.get("cache_subdir", "datasets"))), name.split(".")[0])


def get_file_once(get_file: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets one process of this machine work on a file at a time; the next finds it there."""
    arguments = inspect.signature(get_file).bind(*args, **kwargs).arguments
    if arguments.get("origin") is None:
        return get_file(*args, **kwargs)  # Which says so.
    wanted = hashlib.sha256(_destination(arguments).encode()).hexdigest()[:16]
    # Another user of the machine could not open the file.
    lock = os.path.join(tempfile.gettempdir(), f"tfrep-download-{os.getuid()}-{wanted}.lock")
    with filelock.FileLock(lock, timeout=_SECONDS):
        return get_file(*args, **kwargs)


def download_whole(original: Any, url: str, filename: str, reporthook: Any = None, data: Any = None) -> Any:
    """Gives a file its name when it is complete: another process may be reading an older one. One process draws a bar."""
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
    """Does what `whole` does for files of Keras: a full disk is an error in HDF5 too, and errors show the path that was asked for.

    Args:
        path: As of `whole`.
        num_bytes: Likewise.
        largest: Likewise.
        parents: Likewise.

    Yields:
        Where Keras is to write.
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
    """Lets Keras and TensorFlow show the path that was asked for, where they print or log the one that they write to.

    Args:
        unfinished: Where they write.
        path: What that will be called.
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
    """A stream on which one path is shown as another."""

    def __init__(self, stream: Any, names: tuple[str, str]) -> None:
        self._stream, self._names = stream, names

    def write(self, text: str) -> int:
        return self._stream.write(text.replace(*self._names))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
