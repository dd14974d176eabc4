"""The strategy that connects this process with the others, and groups of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.core.validation import checked
from tfrep_strategy.errors import ConfigurationError, is_count, message, shown
from tfrep_strategy.keras_integration.whole_files import draw_bars_where

_latest: Any = None


def remember(strategy: Any) -> None:
    """Makes a strategy the default for code outside all scopes, until another one connects this process.

    The strategy is kept alive. Python would free it at another time on each rank, and ranks with different defaults would wait
    for each other forever.
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


class ReplicaGroup:
    """A group of a strategy's replicas. `strategy.new_group` makes it; every collective takes it as `group`.

    All replicas may call a collective of the group. On `MirroredStrategy` all must call it. A replica outside the group
    gets the result for a single replica.

    Args:
        strategy: The strategy.
        replicas: The replica ids of the members, ascending.
        communicator_of: Returns the communicator of a replica of this process.
    """

    def __init__(self, strategy: Any, replicas: Sequence[int], communicator_of: Callable[[int], Communicator]) -> None:
        self.strategy = strategy
        self.replicas = tuple(replicas)
        self.communicator_of = communicator_of

    def __len__(self) -> int:
        return len(self.replicas)

    def __contains__(self, replica: object) -> bool:
        return replica in self.replicas

    def __repr__(self) -> str:
        return f"ReplicaGroup({list(self.replicas)})"


def check_members(replicas: Sequence[int], num_replicas: int) -> list[int]:
    """Returns the sorted members of a group.

    Raises:
        ConfigurationError: There are no members, an id is not below `num_replicas`, or an id is given twice.

    Example:
        >>> check_members([2, 0], 4)
        [0, 2]
    """
    replicas = checked(list[Any], "replicas", replicas, hint=f"the strategy has replicas 0 to {num_replicas - 1}.")
    wrong = [r for r in replicas if not is_count(r, 0, num_replicas - 1)]
    if wrong or not replicas or len(set(replicas)) != len(replicas):
        what = f"There is no replica {shown(wrong[0])}." if wrong else "A group needs at least one replica, and each only once."
        raise ConfigurationError(message(what, hint=f"the strategy has replicas 0 to {num_replicas - 1}.", replicas=replicas))
    return sorted(replicas)
