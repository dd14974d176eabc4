"""Finds the strategy that connects this process with the others, also outside its scope."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.environments import detect_environment
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.shared.files import draw_bars_where

_latest: Any = None


def remember(strategy: Any) -> None:
    """Makes a strategy the default for code outside all scopes, until another one connects this process.

    It is kept alive. Python frees what nobody uses at another time on each rank, and ranks with different defaults would
    wait for each other forever.
    """
    global _latest
    if strategy.num_replicas_in_sync > 1:
        _latest = strategy


def process_strategy() -> Any:
    """Returns the `MultiWorkerStrategy` in scope, else the last one that has connected this process with others.

    Returns:
        The strategy; None if there is none.

    Example:
        >>> process_strategy() is None
        True
    """
    in_scope = tf.distribute.get_strategy()
    return in_scope if hasattr(in_scope, "communicator") else _latest


def process_communicator() -> Communicator:
    """Returns the communicator of this process, for use outside a step.

    Raises:
        ConfigurationError: This process is one of several, and has not made a strategy that connects them.

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
                    hint="make a tfrep.MultiWorkerStrategy first, on all ranks, and keep a reference to it.",
                    environment=environment.describe(),
                )
            )
    return SingleCommunicator()


def is_chief_process() -> bool:
    """Returns whether this process is the chief: rank 0, or a single process."""
    strategy = process_strategy()
    if strategy is not None:
        return strategy.extended.is_chief
    return coordinates_servers() or detect_environment().rank == 0


def coordinates_servers() -> bool:
    """Returns whether this process is the coordinator of parameter servers, the only process that runs the script."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def _is_first() -> bool:
    with contextlib.suppress(ConfigurationError):  # The same error is raised when a strategy is made.
        return detect_environment().rank == 0
    return True


draw_bars_where(_is_first)
