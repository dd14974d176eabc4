"""A small process that ends the ranks of a launcher that was killed without warning."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfrep_strategy.processes.command import search_path
from tfrep_strategy.processes.process_groups import Group

_ABOVE_THE_PACKAGE = str(Path(__file__).resolve().parents[2])

# What a rank's death would orphan is found through the rank, so it is looked for before anything is killed.
_GUARD = """
import contextlib, json, shutil, signal, sys
sys.path[:] = json.loads(sys.argv[1])
import psutil
from tfrep_strategy.processes.process_groups import Group
groups = [Group(*map(int, line.split())) for line in sys.stdin]
members = [member for group in groups for member in group.descendants()]
for group in groups:
    group.send(signal.SIGKILL)
for member in members:
    with contextlib.suppress(psutil.Error):
        member.kill()
for folder in sys.argv[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


@contextlib.contextmanager
def guard(temporary: Sequence[Path]) -> Iterator[Callable[[Group], None]]:
    """Starts a process that kills groups and removes folders if this process dies while the body runs.

    Args:
        temporary: The folders.

    Yields:
        Tells it of another group.

    Example:
        >>> with guard([]) as watch_group:
        ...     pass
    """
    path = json.dumps([_ABOVE_THE_PACKAGE, *search_path()])
    arguments = [sys.executable, "-I", "-S", "-c", _GUARD, path, *map(os.path.abspath, temporary)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    try:
        yield lambda group: print(group.leader, group.started, file=process.stdin)
    finally:
        process.kill()
        process.communicate()
