"""A call whose collectives the monitor watches, and whom it cannot go on without."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

from tfrep_strategy.communicators.peers.ended import Ended


class WatchedCall:
    """One collective, or a body of several.

    Args:
        group: The ranks that take part.
        single: Whether it is one collective.
        others: The calls that are under way, in the order in which they began.

    Attributes:
        began: When it began.
        waits_since: When it began, or when the last call inside it ended.
    """

    def __init__(self, group: Sequence[int], single: bool, others: Sequence[WatchedCall]) -> None:
        self.group, self.single = group, single
        self.began = self.waits_since = time.monotonic()
        self._thread = threading.get_ident()
        self._outer = next((call for call in reversed(others) if call._thread == self._thread), None)
        self._seen: weakref.ref[Exception] | None = None

    @property
    def is_outermost(self) -> bool:
        """Whether it is inside no other call."""
        return self._outer is None

    def end(self) -> None:
        """Notes that it has ended."""
        if self._outer is not None:
            self._outer.waits_since = time.monotonic()

    def is_seen(self, error: Exception) -> bool:
        """Returns whether a call inside this one has looked at an error before; notes that this one has."""
        is_seen = self._seen is not None and self._seen() is error
        if self._outer is not None:
            self._outer._seen = weakref.ref(error)
        return is_seen


def innermost(calls: Sequence[WatchedCall]) -> list[WatchedCall]:
    """Returns the calls that other calls are not inside of; each thread has one."""
    return list({call._thread: call for call in calls}.values())


def missing(group: Sequence[int], ended: Sequence[Ended]) -> list[Ended]:
    """Returns those ranks that have ended without which a group cannot go on; first those that failed.

    Nobody can go on without a rank that failed, nor without rank 0, which has the hub.
    """
    needed = [each for each in ended if each.failed or each.rank in group or each.rank == 0]
    return sorted(needed, key=lambda each: not each.failed)
