"""How ranks share the cores of a machine. Where each takes all of them for an operation, they keep each other waiting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.quotas import bound_cores, usable_cores

THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"
"""By which TensorFlow learns how many threads an operation may take. It reads the variable when it starts its devices."""

_CORES = Path("/sys/devices/system/cpu")


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


def cores_of_ranks(ranks: int) -> list[frozenset[int]]:
    """Cuts the cores of this process into equal parts, one for each rank.

    Hardware threads of one core stay together, and cores of one socket do: the kernel may number the first threads of all cores
    before the second ones, and ranks that share a core keep each other waiting.

    Args:
        ranks: How many of them have the cores of this process together.

    Returns:
        The numbers of each rank's own cores. Cores that are left over belong to no rank.

    Raises:
        ConfigurationError: There are fewer cores than ranks, or this system binds no processes.

    Example:
        >>> len(cores_of_ranks(1))
        1
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(message("This system does not bind processes to cores.", hint="leave --bind-cores out."))
    cores = sorted(os.sched_getaffinity(0), key=_place)
    each = len(cores) // ranks
    if not each:
        hint = "use fewer ranks on this machine, or leave --bind-cores out."
        raise ConfigurationError(message("There is no core for each rank.", hint=hint, ranks=ranks, cores=len(cores)))
    return [frozenset(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _place(core: int) -> tuple[int, int, int]:
    """Returns the socket and the core of a hardware thread, and its own number (Linux: `admin-guide/cputopology`)."""
    folder = _CORES / f"cpu{core}" / "topology"
    try:
        socket, physical = (int((folder / name).read_text("utf-8")) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # Some virtual machines do not say.
        return 0, core, core
    return socket, physical, core


@contextlib.contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Binds this thread while the body runs. Processes that it starts meanwhile stay bound, with all their threads.

    Args:
        cores: Their numbers; none binds nothing.

    Example:
        >>> with bound_to(()):
        ...     bound_cores() >= 1
        True
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
