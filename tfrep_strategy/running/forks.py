"""Whether the ranks of a run are forked from one process, which has imported TensorFlow for all of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from tfrep_strategy.nvidia import gpus_are_visible
from tfrep_strategy.processes.forked_ranks import ForkServers
from tfrep_strategy.running.runs import Options

_PRELOADS = "tfrep_strategy.running.scope"


def reason_against_forks(options: Options) -> str:
    """Says why the ranks of a run are not forked by default; empty if they are.

    Args:
        options: What is wanted.

    Example:
        >>> reason_against_forks(Options(num_replicas=1))
        'one rank shares its imports with nobody'
    """
    if options.size == 1 or options.resolved_strategy == "mirrored":
        return "one rank shares its imports with nobody"
    if options.resolved_strategy is None:
        return "the function may import TensorFlow as it likes, or not at all"
    if sys.platform != "linux":
        return "forks of a process that has imported TensorFlow are known to work on Linux only"
    if gpus_are_visible():
        return "GPUs are visible, whose libraries may not be forked"
    return ""


@contextlib.contextmanager
def fork_servers(options: Options, shown: Sequence[str] = ()) -> Iterator[ForkServers | None]:
    """Gives the process from which ranks are forked, and ends it afterwards.

    Args:
        options: What is wanted. `fork` decides if it is given.
        shown: What a list of processes shows of the ranks.

    Yields:
        What starts the process when it is asked for; None if ranks are not to be forked.

    Example:
        >>> with fork_servers(Options(num_replicas=2, fork=False)) as servers:
        ...     servers is None
        True
    """
    forks = not reason_against_forks(options) if options.fork is None else options.fork
    if not forks:
        yield None
        return
    with contextlib.closing(ForkServers(_PRELOADS, shown)) as servers:
        yield servers
