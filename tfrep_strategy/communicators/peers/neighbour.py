"""Where no launcher of this package looks at ranks from outside, each looks at the next rank of its machine."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tfrep_strategy.stopped import OtherProcess, longest_stop

_log = logging.getLogger(__name__)

class Seat(NamedTuple):
    """Where a rank is.

    Attributes:
        machine: A number of its machine, or container; 0 if that is not known.
        pid: Its process there.
    """

    machine: int
    pid: int


def own_seat() -> Seat:
    """Returns where this process is.

    Example:
        >>> own_seat().pid == os.getpid()
        True
    """
    with contextlib.suppress(OSError):  # Not Linux.
        machine = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8") + os.readlink("/proc/self/ns/pid")
        return Seat(int.from_bytes(hashlib.sha256(machine.encode()).digest()[:6], "big"), os.getpid())
    return Seat(0, os.getpid())


class Neighbour:
    """Another rank of this machine.

    Args:
        rank: Its number.
        pid: Its process.

    Raises:
        psutil.Error: It has ended.

    Example:
        >>> Neighbour(1, os.getpid()).end_if_stopped(print)
    """

    def __init__(self, rank: int, pid: int) -> None:
        self._rank, self._process = rank, OtherProcess(pid)

    @classmethod
    def of(cls, rank: int, seats: Sequence[Seat]) -> Neighbour | None:
        """Returns the rank at which a rank has to look.

        Args:
            rank: Who looks.
            seats: Where each rank is.

        Returns:
            The next one on the same machine; None if there is none, or somebody else looks: a launcher of this package.
        """
        if "TFREP_RESTARTS" in os.environ or math.isinf(longest_stop()) or not seats[rank].machine:
            return None
        for other in (*range(rank + 1, len(seats)), *range(rank)):
            if seats[other].machine == seats[rank].machine and seats[other].pid != seats[rank].pid:
                with contextlib.suppress(psutil.Error):
                    return cls(other, seats[other].pid)
                return None
        return None

    def end_if_stopped(self, tell: Callable[[Any], None]) -> None:
        """Looks once. If it is stopped for too long, kills it: all would wait for it.

        Args:
            tell: Sends something to the hub. If that is in the rank itself, nobody can be told why it ends.
        """
        seconds = self._process.look()
        if seconds:
            _log.error("Rank %d is stopped (state T), for %.0f seconds by now, and is ended.", self._rank, seconds)
            tell(("stopped", self._rank, seconds))
            self._process.kill()
