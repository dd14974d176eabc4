"""Lets the chief do something once for all processes, in a script that every rank runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfrep_strategy.collectives.between_processes import check_no_step
from tfrep_strategy.errors import PeerError
from tfrep_strategy.strategies.of_process import is_chief_process, process_communicator


def is_chief() -> bool:
    """Returns whether this process is the chief, which writes files: rank 0, or a single process.

    It can be called anywhere, also before a strategy is made.

    Returns:
        True on the chief.

    Example:
        >>> if tfrep.is_chief():
        ...     print("only once")
        only once
    """
    return is_chief_process()


@contextlib.contextmanager
def chief_first() -> Iterator[None]:
    """Runs the body on the chief first, then on the other processes. They find the files that the chief has written.

    Every process must call it, after a strategy was made. The others wait as in a collective. If the chief may take
    longer than `TFREP_TIMEOUT` (600 seconds), raise that limit.

    Yields:
        Nothing.

    Raises:
        PeerError: The chief's body raised an error. Raised on the other processes; their body does not run.
        ConfigurationError: The caller is inside a step, or no strategy connects the processes.

    Example:
        >>> with tfrep.chief_first():
        ...     print("rank 0 comes here before the others")
        rank 0 comes here before the others
    """
    check_no_step("chief_first")
    communicator = process_communicator()
    if communicator.rank:
        failure = communicator.broadcast_object(None)
        if failure is not None:
            raise PeerError(f"The chief failed in chief_first: {failure}")
        yield
        return
    try:
        yield
    except Exception as error:
        communicator.broadcast_object(f"{type(error).__name__}: {error}")
        raise
    communicator.broadcast_object(None)
