"""Sub-groups of replicas, which may talk among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.errors import ConfigurationError, message


class ReplicaGroup:
    """Some of a strategy's replicas; made by `strategy.new_group`, taken by every collective as `group=`.

    All replicas may call a collective of the group, on `MirroredStrategy` all have to; one that is no member gets the
    answer of a replica that is alone.

    Args:
        strategy: The strategy.
        replicas: The members' replica ids, ascending.
        communicator_of: Gives the communicator of a replica in this process.
    """

    def __init__(
        self, strategy: Any, replicas: Sequence[int], communicator_of: Callable[[int], Communicator]
    ) -> None:
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
        ConfigurationError: unless they are different replica ids, at least one, of a strategy of `num_replicas`.

    Example:
        >>> check_members([2, 0], 4)
        [0, 2]
    """
    wrong = [r for r in replicas if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < num_replicas]
    if wrong or not replicas or len(set(replicas)) != len(replicas):
        what = f"There is no replica {wrong[0]!r}." if wrong else "A group needs replicas, each of them once."
        raise ConfigurationError(
            message(what, hint=f"the strategy has replicas 0 to {num_replicas - 1}.", replicas=list(replicas))
        )
    return sorted(replicas)
