"""Files that several processes of one machine want: none finds the half of one."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import tempfile
import urllib.parse
from collections.abc import Callable
from typing import Any

import filelock

from tfrep_strategy.keras_integration.patching import keras_internal

_config = keras_internal("backend.config")
_SECONDS = 3600

_draws_bars: Callable[[], bool] = lambda: True  # noqa: E731


def draw_bars_where(is_first: Callable[[], bool]) -> None:
    """Says which process draws the bars of downloads; `is_first` is called before each."""
    global _draws_bars
    _draws_bars = is_first


def _destination(arguments: dict[str, Any]) -> str:
    """Returns what all downloads that touch the same files have in common: their folder and the name without its endings."""
    folder = os.path.expanduser(arguments.get("cache_dir") or _config.keras_home())
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


def makedirs(original: Any, path: Any) -> None:
    """Makes a folder that another process may make at the same time: Keras looks first whether it exists."""
    try:
        original(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
