"""Groups of replicas, for collectives between some of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.errors import ConfigurationError, is_count, message, shown
from tfrep_strategy.validation import checked


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
