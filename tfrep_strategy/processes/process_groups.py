"""Groups of processes. When all members have ended, the system may give a group's number to any other process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil


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
