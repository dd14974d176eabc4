"""How ranks share the cores of a machine. Where each takes all of them for an operation, they keep each other waiting."""

from __future__ import annotations

import os

from tfrep_strategy.quotas import bound_cores, usable_cores

THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"
"""By which TensorFlow learns how many threads an operation may take. It reads the variable when it starts its devices."""


def threads_of_rank(ranks: int) -> int:
    """Returns how many threads an operation of one of several ranks may take, so that all together take each core once.

    A core that a container may not use counts for none.

    Args:
        ranks: How many of them have the cores of this process together.

    Example:
        >>> threads_of_rank(10_000)
        1
    """
    return max(1, usable_cores() // ranks)


def thread_variables(ranks: int) -> dict[str, str]:
    """Returns variables by which ranks that this process starts share its cores; none if the user's own decide.

    Args:
        ranks: How many there will be on this machine.

    Example:
        >>> thread_variables(1)
        {}
    """
    return {} if ranks == 1 or THREADS_VARIABLE in os.environ else {THREADS_VARIABLE: str(threads_of_rank(ranks))}


def is_bound() -> bool:
    """Returns whether some cores of the machine are not for this process: its launcher may have given them to other ranks."""
    return bound_cores() < (os.cpu_count() or 1)
