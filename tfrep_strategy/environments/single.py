"""The environment of a single process."""

from __future__ import annotations

from tfrep_strategy.environments.base import Environment


class SingleEnvironment(Environment):
    """The environment of a process that no launcher has started together with others.

    Example:
        >>> SingleEnvironment().size
        1
    """

    name = "single process"

    @classmethod
    def detect(cls) -> bool:
        """Returns True: this environment is asked last."""
        return True

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, hosts=["localhost"])
