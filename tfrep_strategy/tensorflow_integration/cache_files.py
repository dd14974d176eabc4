"""`tf.data.Dataset.cache(filename)` on several processes: each writes a file of its own."""

from __future__ import annotations

import functools
import os
from typing import Any

_suffix = ""


def cache_in_own_files(rank: int, size: int) -> None:
    """Gives each process a cache file of its own, for data sets that are cached from now on.

    Every process reads the whole data set. All would write the same file at once, which TensorFlow refuses. The file of
    rank 0 keeps its name; those of the other ranks end in `.rank-1`, `.rank-2`, ...

    Args:
        rank: The rank of this process.
        size: The number of processes.
    """
    global _suffix
    _suffix = f".rank-{rank}" if rank and size > 1 else ""


def with_own_file(cache: Any) -> Any:
    """Returns what caches in the file of a process."""

    @functools.wraps(cache)
    def cache_in_own_file(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            filename = f"{os.fspath(filename)}{_suffix}"
        return cache(self, filename, name)

    return cache_in_own_file
