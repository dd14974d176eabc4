"""What Keras keeps for each thread: scopes, settings, names, and the generator of seeds that nobody gave.

Each replica of one process has a thread. It starts with a copy of the state of the thread that runs the strategy, since a
replica may stop inside a scope while another one runs. The caller is left with what the first replica leaves behind, as it
would be after one device.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from tfrep_strategy.keras_integration.internals import global_state
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_TRACKERS = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
_SEED_GENERATOR = "global_seed_generator"

_state_of_caller: Setting[CallerState | None] = Setting(None)
"""On the thread of a replica: the state of the thread that runs the strategy."""


class CallerState:
    """The state of the thread that makes it, for the threads of its replicas.

    Args:
        outside_replicas: Returns a context, for the thread of a replica, whose variables are made once for all replicas.
    """

    def __init__(self, outside_replicas: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.outside_replicas = outside_replicas
        self._callers = [_state_of_this_thread(name) for name in _TRACKERS]
        self._at_start = [{key: _copied(value) for key, value in caller.items()} for caller in self._callers]

    @contextlib.contextmanager
    def in_replica(self, first: bool) -> Iterator[None]:
        """Gives the state to this thread; the `first` replica returns its own to the caller."""
        owns = [_state_of_this_thread(name) for name in _TRACKERS]
        for own, start in zip(owns, self._at_start, strict=True):
            own.update(start)
        try:
            with _state_of_caller.to(self):
                yield
        finally:
            if first:
                for own, caller in zip(owns, self._callers, strict=True):
                    caller.update(own)

    def seed_generator(self, make: Callable[[], Any]) -> Any:
        """Returns the generator of the caller, which has one from now on."""
        shared = self._callers[0]
        if shared.get(_SEED_GENERATOR) is None:
            with self.outside_replicas():
                shared[_SEED_GENERATOR] = make()
        return shared[_SEED_GENERATOR]


def _state_of_this_thread(tracker: str) -> dict[str, Any]:
    return vars(getattr(global_state, tracker))


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


class Seeds(SynchronousBase):
    """Who draws the seeds that nobody gave."""

    def global_seed_generator(self, original: Any) -> Any:
        """Draws them from one generator on all replicas of a process, and in all steps."""
        caller = _state_of_caller.value
        own = _state_of_this_thread("GLOBAL_STATE_TRACKER")
        if caller is not None and own.get(_SEED_GENERATOR) is None:
            own[_SEED_GENERATOR] = caller.seed_generator(original)
        return original()
