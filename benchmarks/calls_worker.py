"""One of several processes of `benchmarks.calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfrep_strategy as tfrep
from benchmarks.calls import counts_of_a_step
from benchmarks.crews import work


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[Any], dict[str, float]]:
    """Sets a process up.

    Args:
        settings: "communicator": how the processes talk.

    Returns:
        A function that counts what a step of this process does.
    """
    strategy = tfrep.MultiWorkerStrategy(settings["communicator"])
    return lambda question: counts_of_a_step(strategy)


if __name__ == "__main__":
    main()
