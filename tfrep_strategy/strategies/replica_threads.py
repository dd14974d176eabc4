"""Copies the state of the calling thread to the threads of the replicas of one process.

TensorFlow copies graphs, devices, name and variable scopes, and the state of summaries. This module adds the state of
Keras, Python's context variables, and TensorFlow's own `threading.local`s.
"""

from __future__ import annotations

import contextvars
import functools
from typing import Any

from tfrep_strategy._tensorflow import save_context, sync_on_read_context
from tfrep_strategy.keras_integration.finding import driver_of
from tfrep_strategy.keras_integration.synchronous.driver import SynchronousDriver
from tfrep_strategy.keras_integration.synchronous.thread_state import CallerState
from tfrep_strategy.strategies.seeds import seeds_of_replica

_THREAD_LOCALS = (save_context, sync_on_read_context)


class _Inherited:
    """The state of the current thread, for the thread of a replica."""

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self._context = contextvars.copy_context()
        self._keras = CallerState()
        self._locals = [dict(vars(local)) for local in _THREAD_LOCALS]

    def run(self, fn: Any) -> None:
        for local, state in zip(_THREAD_LOCALS, self._locals, strict=True):
            vars(local).update(state)
        replica_id = self._thread.replica_id
        with seeds_of_replica(replica_id), self._keras.in_replica(first=replica_id == 0):
            self._context.run(fn)


def inheriting(init: Any) -> Any:
    """Returns what makes the thread of a replica, with the state of its caller."""

    @functools.wraps(init)
    def inheriting_init(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        init(self, strategy, *args, **kwargs)
        self.inherited = _Inherited(self) if isinstance(driver_of(strategy), SynchronousDriver) else None

    return inheriting_init


def with_inherited(run: Any) -> Any:
    """Returns what runs the thread of a replica in that state."""

    @functools.wraps(run)
    def run_with_inherited(self: Any) -> None:
        if self.inherited is None:
            run(self)
        else:
            self.inherited.run(functools.partial(run, self))

    return run_with_inherited
