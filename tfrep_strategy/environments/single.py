"""One process alone."""

from __future__ import annotations

from tfrep_strategy.environments.base import Environment


class SingleEnvironment(Environment):
    """What holds when nobody started several processes.

    Example:
        >>> SingleEnvironment().size
        1
    """

    name = "single process"

    @classmethod
    def detect(cls) -> bool:
        """Always true: this is the last resort."""
        return True

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, hosts=["localhost"])
