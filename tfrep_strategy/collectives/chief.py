"""What one process does for all, in scripts that every rank runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfrep_strategy.collectives.processes import check_no_step
from tfrep_strategy.errors import PeerError
from tfrep_strategy.strategies.of_process import is_chief_process, process_communicator


def is_chief() -> bool:
    """Tells whether this process is the one that writes files: rank 0, or a process that is alone.

    It may be asked anywhere, also before a strategy is made.

    Returns:
        Whether it is.

    Example:
        >>> if tfrep.is_chief():
        ...     print("only once")
        only once
    """
    return is_chief_process()


@contextlib.contextmanager
def chief_first() -> Iterator[None]:
    """Runs the body on the chief, and when that is done on all others, which then find what the chief has made.

    Every process has to come here, with a strategy made before. The others wait as in a collective: if the chief may take
    longer than `TFREP_TIMEOUT` (600 seconds), raise that.

    Yields:
        Nothing.

    Raises:
        PeerError: on the others, whose body does not run, when the chief's body raised an error.
        ConfigurationError: inside a step, or where no strategy connects the processes.

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
