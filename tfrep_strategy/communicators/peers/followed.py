"""Collectives in functions, which a rank reports once it has been in them for some time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tfrep_strategy.communicators.peers.reports import Report
from tfrep_strategy.communicators.position import Position, Stay

_LOOKS = 3
"""After how many looks in the same collective a rank reports it."""


class Followed:
    """A position that the monitor looks at from time to time.

    Args:
        group: The ranks that take part.
        number: The number of the group's communicator.
        position: The position.
        limit: How many seconds the rank may wait for others in a collective.
    """

    def __init__(self, group: Sequence[int], number: int, position: Position, limit: float) -> None:
        self.group, self._number, self._position, self._limit = group, number, position, limit
        self._looks: dict[Stay, int] = {}
        self._until: dict[Stay, float] = {}

    def look(self) -> list[Report]:
        """Returns a report of each collective that the rank has been in for some time, and one more if it reaches the limit."""
        now, stays = time.monotonic(), list(self._position.read())
        self._looks = {stay: self._looks.get(stay, 0) + 1 for stay in stays}
        self._until = {stay: self._until.get(stay, now + self._limit) for stay in stays}
        late = [stay for stay, until in self._until.items() if now > until]
        self._until |= dict.fromkeys(late, math.inf)
        stuck = [stay for stay, looks in self._looks.items() if looks == _LOOKS]
        return [self._report(stay, False) for stay in stuck] + [self._report(stay, True) for stay in late]

    def _report(self, stay: Stay, is_late: bool) -> Report:
        return Report(self.group, (self._number, stay.place, stay.times), stay.call, waits=False, is_limited=is_late)
