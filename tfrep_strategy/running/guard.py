"""A small process that ends the ranks of a launcher that was killed without warning.

Groups of processes. When all members have ended, the system may give a group's number to any other process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tfrep_strategy.cluster.command import search_path


@dataclass(frozen=True)
class Group:
    """A process and the group that it leads.

    Args:
        leader: The process id, which is the number of the group.
        started: When it was started, in ticks since the machine was; 0 if it had ended when that was asked.

    Example:
        >>> Group.of(os.getpid()).leader == os.getpid()
        True
    """

    leader: int
    started: int

    @classmethod
    def of(cls, leader: int) -> Group:
        """Returns the group of a process that was just started."""
        return cls(leader, _started(leader))

    def send(self, number: int) -> None:
        """Sends a signal to all members, also where the leader has ended. It may be that there are none any more."""
        if _started(self.leader) in (0, self.started):  # Else the number is another's by now.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, number)

    def descendants(self) -> list[psutil.Process]:
        """Returns the processes that the leader has started, and those that these have."""
        if self.started and _started(self.leader) == self.started:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(self.leader).children(recursive=True)
        return []


def _started(pid: int) -> int:
    try:
        found = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return 0
    return int(found.rpartition(")")[2].split()[19])


_ABOVE_THE_PACKAGE = str(Path(__file__).resolve().parents[2])

# What a rank's death would orphan is found through the rank, so it is looked for before anything is killed.
_GUARD = """
import contextlib, json, shutil, signal, sys
sys.path[:] = json.loads(sys.argv[1])
import psutil
from tfrep_strategy.running.guard import Group
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
