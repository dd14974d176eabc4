"""What Keras keeps for each thread: scopes, settings and names.

Each replica of one process has a thread. It starts with a copy of the state of the thread that runs the strategy, since a
replica may stop inside a scope while another one runs. The caller is left with what the first replica leaves behind, as it
would be after one device.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from tfrep_strategy.keras_integration.internals import global_state

_TRACKERS = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")


class CallerState:
    """The state of the thread that makes it, for the threads of its replicas."""

    def __init__(self) -> None:
        self._callers = [_state_of_this_thread(name) for name in _TRACKERS]
        self._at_start = [{key: _copied(value) for key, value in caller.items()} for caller in self._callers]

    @contextlib.contextmanager
    def in_replica(self, first: bool) -> Iterator[None]:
        """Gives the state to this thread; the `first` replica returns its own to the caller."""
        owns = [_state_of_this_thread(name) for name in _TRACKERS]
        for own, start in zip(owns, self._at_start, strict=True):
            own.update(start)
        try:
            yield
        finally:
            if first:
                for own, caller in zip(owns, self._callers, strict=True):
                    caller.update(own)


def _state_of_this_thread(tracker: str) -> dict[str, Any]:
    return vars(getattr(global_state, tracker))


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value
