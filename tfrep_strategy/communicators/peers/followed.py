"""Collectives in functions, which a rank reports once it has been in them for some time."""

from __future__ import annotations

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
    """

    def __init__(self, group: Sequence[int], number: int, position: Position) -> None:
        self.group, self._number, self._position = group, number, position
        self._looks: dict[Stay, int] = {}

    def look(self) -> list[Report]:
        """Returns a report of each collective that the rank has been in for some time; each once."""
        self._looks = {stay: self._looks.get(stay, 0) + 1 for stay in self._position.read()}
        stuck = [stay for stay, looks in self._looks.items() if looks == _LOOKS]
        return [Report(self.group, (self._number, stay.place, stay.times), stay.call, False) for stay in stuck]
