"""A small process that ends the ranks of a launcher that was killed without warning."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# What a rank's death would orphan is found through the rank, so it is looked for before anything is killed.
_GUARD = """
import contextlib, json, os, shutil, signal, sys
groups = [int(line) for line in sys.stdin]
sys.path[:] = json.loads(sys.argv[1])
import psutil
members = []
for group in groups:
    with contextlib.suppress(psutil.Error):
        members += psutil.Process(group).children(recursive=True)
for group in groups:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
for member in members:
    with contextlib.suppress(psutil.Error):
        member.kill()
for folder in sys.argv[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


@contextlib.contextmanager
def guard(temporary: Sequence[Path]) -> Iterator[Callable[[int], None]]:
    """Starts a process that kills groups and removes folders if this process dies while the body runs.

    Args:
        temporary: The folders.

    Yields:
        Tells it of another group.

    Example:
        >>> with guard([]) as watch_group:
        ...     pass
    """
    arguments = [sys.executable, "-I", "-S", "-c", _GUARD, json.dumps(sys.path), *map(os.path.abspath, temporary)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    try:
        yield lambda pid: print(pid, file=process.stdin)
    finally:
        process.kill()
        process.communicate()
