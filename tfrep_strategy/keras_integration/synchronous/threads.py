"""Keras's state of threads, and calls from threads other than the training one.

Each replica of one process has a thread. It starts with a copy of the scopes, settings and names of the calling thread, since a
replica may stop inside a scope while another one runs. The caller gets the state of the first replica, as after one device.

Other threads may call as well, such as a web service that predicts, or a timer that saves. The order of such calls cannot be
agreed between ranks. So each rank answers them alone, as one device, without a collective.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.tf import in_no_strategy
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.internals import TensorFlowTrainer, global_state
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_TRACKERS = [name for name in vars(global_state) if name.endswith("_TRACKER")]


class CallerState:
    """The state of the current thread, for the threads of its replicas."""

    def __init__(self) -> None:
        self._callers = [_state_of_this_thread(name) for name in _TRACKERS]
        self._at_start = [{key: _copied(value) for key, value in caller.items()} for caller in self._callers]

    @contextlib.contextmanager
    def in_replica(self, first: bool) -> Iterator[None]:
        """Gives the state to this thread; the `first` replica returns its own state to the caller."""
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


answers_alone = Setting(False)
"""Whether this thread reads this rank's variables without the other ranks."""

_OF_LOOPS = frozenset({
    "_make_function", "evaluate", "make_predict_function", "make_test_function", "predict", "predict_on_batch", "test_on_batch",
})  # fmt: skip


class _OnOneDevice:
    """A model as Keras's loops see it on one device, with its own functions and strategy.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.predict_function = self.test_function = None
        with in_no_strategy():
            self.distribute_strategy = tf.distribute.get_strategy()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LOOPS:
            return types.MethodType(getattr(TensorFlowTrainer, name), self)
        return getattr(self._model(), name)


class OtherThreads(SynchronousBase):
    """Keeps the leading thread: the one that made the strategy or has trained last; the main thread if that has ended."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._leader = threading.current_thread()
        self._training = 0
        """Number of nested calls that train now."""
        self._on_one_device: weakref.WeakKeyDictionary[Any, _OnOneDevice] = weakref.WeakKeyDictionary()

    @property
    def is_other_thread(self) -> bool:
        """Whether other ranks do not follow this thread."""
        if not self._leader.is_alive():
            self._leader = threading.main_thread()
        return self.has_several_ranks and threading.current_thread() is not self._leader

    @contextlib.contextmanager
    def leading(self, method: str) -> Iterator[None]:
        """Makes this thread the one that other ranks follow, while it trains and from then on.

        Raises:
            ConfigurationError: Another thread trains. Only this call fails.
        """
        if self.is_other_thread and self._training:
            raise ConfigurationError(
                message(
                    "Another thread trains, and ranks could not agree on the order of the steps of two threads.",
                    hint="train in one thread, or wait until it has ended; other threads may predict, evaluate and save.",
                    method=method,
                )
            )
        self._leader = threading.current_thread()
        self._training += 1
        try:
            yield
        finally:
            self._training -= 1

    def alone(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a loop of Keras for this rank alone.

        Args:
            original: Keras's own method.
            model: Its model.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.
        """
        as_one = self._on_one_device.setdefault(model, _OnOneDevice(model))
        with answers_alone.to(True), in_no_strategy():
            return original(as_one, *args, **kwargs)
