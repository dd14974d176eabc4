"""While the step of one device is traced: there is one replica, the global one, whoever asks.

Keras and the user's code find no strategy and no replicas, as on one device, and a variable with copies acts as its first one. What
they create belongs to the strategy all the same: it is made outside of the trace, in the strategy's scope.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import (
    DefaultDistributionExtended,
    default_replica_mode,
    pop_mode,
    push_mode,
    saving,
)
from tfrep_strategy.errors import ConfigurationError, message

_thread = threading.local()


class OneReplica(DefaultDistributionExtended):
    """The `extended` of a strategy for a thread that traces the step of one device."""

    def _scope(self, strategy: Any) -> Any:
        return contextlib.nullcontext(strategy)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        return contextlib.nullcontext()  # A variable with copies has one beside each copy of the other.


class HasOneReplica:
    """Gives a `tf.distribute.Strategy` one replica on threads that trace the step of one device."""

    @property
    def _extended(self) -> Any:
        return getattr(_thread, "extended", {}).get(id(self), self._own_extended)

    @_extended.setter
    def _extended(self, extended: Any) -> None:
        self._own_extended = extended

    @property
    def _is_one_replica(self) -> bool:
        """Whether this thread traces the step of one device."""
        return id(self) in getattr(_thread, "extended", ())


@contextlib.contextmanager
def one_replica(strategy: Any) -> Iterator[list[Any]]:
    """Opens a block in which this thread traces the step of one device, for a strategy that `HasOneReplica`.

    Args:
        strategy: The strategy.

    Yields:
        The variables that are made in the block, as they are made.
    """
    made: list[Any] = []
    extendeds = _thread.__dict__.setdefault("extended", {})

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["initial_value"] = _outside_of_trace(kwargs.get("initial_value"))
        one = extendeds.pop(id(strategy))
        try:
            with tf.init_scope(), strategy.scope():
                made.append(next_creator(**kwargs))
        finally:
            extendeds[id(strategy)] = one
        return made[-1]

    with strategy.scope(), _in_no_strategy(), tf.variable_creator_scope(create):
        extendeds[id(strategy)] = OneReplica(strategy)
        try:
            yield made
        finally:
            del extendeds[id(strategy)]


@contextlib.contextmanager
def _in_no_strategy() -> Iterator[None]:
    """Has this thread be in no strategy, whatever scopes are open. A variable with copies acts as when a model is saved."""
    push_mode(default_replica_mode())
    try:
        with saving(tf.saved_model.SaveOptions()):
            yield
    finally:
        pop_mode()


def _outside_of_trace(value: Any) -> Any:
    """Returns an initial value without tensors of the trace."""
    if not tf.is_tensor(value) or not tf.is_symbolic_tensor(value):
        return value
    known = tf.get_static_value(value)
    if known is None:
        raise ConfigurationError(
            message(
                "A variable that is made in a step cannot begin with a value that the step computes.",
                hint="begin with a constant, and assign the value.",
                initial_value=value,
            )
        )
    return known
