"""The strategy that connects this process with the others, found also by code outside its scope."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.environments import detect_environment
from tfrep_strategy.errors import ConfigurationError, message

_latest: Callable[[], Any] = lambda: None  # noqa: E731


def remember(strategy: Any) -> None:
    """Makes a strategy the one that code outside all scopes talks through, as long as it lives."""
    global _latest
    _latest = weakref.ref(strategy)


def process_strategy() -> Any:
    """Finds the strategy of one replica per process that is in scope, else the one that was made last.

    Returns:
        The strategy; None if there is none.

    Example:
        >>> process_strategy() is None
        True
    """
    in_scope = tf.distribute.get_strategy()
    return in_scope if hasattr(in_scope, "communicator") else _latest()


def process_communicator() -> Communicator:
    """Returns what this process talks to the others with, outside a step.

    Raises:
        ConfigurationError: This process is one of several, and has made no strategy that connects them.

    Example:
        >>> process_communicator().size
        1
    """
    strategy = process_strategy()
    if strategy is not None:
        return strategy.communicator
    if not coordinates_servers():
        environment = detect_environment()
        if environment.size > 1:
            raise ConfigurationError(
                message(
                    "The processes are not connected yet.",
                    hint="make a tfrep.MultiWorkerStrategy before, on all ranks, and keep it.",
                    environment=environment.describe(),
                )
            )
    return SingleCommunicator()


def is_chief_process() -> bool:
    """Tells whether this process is rank 0, or alone."""
    strategy = process_strategy()
    if strategy is not None:
        return strategy.is_chief
    return coordinates_servers() or detect_environment().rank == 0


def coordinates_servers() -> bool:
    """Tells whether this process is the coordinator of parameter servers: it alone runs the script."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)
