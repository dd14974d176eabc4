"""Requests to end a run, for custom training loops: all ranks see a request in the same round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfrep_strategy.cluster.notices import is_asked_to_end, keep_requests
from tfrep_strategy.strategies.groups import process_communicator
from tfrep_strategy.training.collectives.between_processes import check_no_step

_SECONDS = 1.0
"""The time between two exchanges of the ranks. All see a request after about this time."""
_MOST_GROWTH = 4
"""The largest growth of the pause between two looks: the first rounds of a loop are slow."""


class _Status(NamedTuple):
    """The message of a rank; rank 0's `rounds` is the number of rounds until the next look."""

    is_asked: bool
    rounds: int


class Requests:
    """Sees requests to end on all ranks at once. It counts the calls between two looks, whose number is equal on all ranks.

    Args:
        gather: Returns the objects of all ranks, given that of this one.

    Attributes:
        is_ending: Whether a rank was asked to end.
    """

    def __init__(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        self.is_ending = False
        self._gather = gather
        self._left, self._rounds, self._last = 0, 1, time.monotonic()

    def ask(self) -> bool:
        """Returns whether a rank was asked to end, as of the last look. All ranks call it equally often."""
        if self._left:
            self._left -= 1
            return self.is_ending
        now = time.monotonic()
        own = int(self._rounds * _SECONDS / max(now - self._last, 1e-6))
        own = max(1, min(own, _MOST_GROWTH * self._rounds))
        statuses = self._gather(_Status(is_asked_to_end(), own))
        self._rounds = statuses[0].rounds
        self._left, self._last = self._rounds - 1, now
        self.is_ending = self.is_ending or any(status.is_asked for status in statuses)
        return self.is_ending


_requests: Requests | None = None


def is_ending() -> bool:
    """Returns whether the run was asked to end (SIGTERM, as before a preemption), on all ranks at once.

    Call it once in each round of a custom training loop, on all ranks, outside steps. From the first call on, SIGTERM ends
    nothing by itself: the program saves, and ends. A launcher kills it after `TFREP_GRACE` seconds. `fit` saves and ends by
    itself, in a run with backups.

    Returns:
        True after a request. Ranks communicate at most once a second; other calls do not wait.

    Raises:
        ConfigurationError: The caller is inside a step, or no strategy connects the processes.

    Example:
        >>> for step in range(1000):
        ...     if tfrep.is_ending():
        ...         print("saves, and ends")
        ...         break
    """
    global _requests
    check_no_step("is_ending")
    if _requests is None:
        keep_requests()
        _requests = Requests(lambda own: process_communicator().all_gather_object(own))
    return _requests.ask()
