"""Decisions of the chief for all ranks, and a check that ranks end alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tfrep_strategy.errors import PeerError, message
from tfrep_strategy.strategies.groups import process_communicator

T = TypeVar("T")
_here = threading.local()


def is_chief() -> bool:
    """Returns whether this process decides."""
    return process_communicator().rank == 0


def is_deciding() -> bool:
    """Returns whether this thread decides for all ranks now, so that it must not ask the other ranks.

    Returns:
        Whether it does.

    Example:
        >>> is_deciding(), of_chief(is_deciding)
        (False, True)
    """
    return getattr(_here, "is_deciding", False)


def of_chief(decide: Callable[[], T]) -> T:
    """Lets rank 0 decide for all. All ranks must call it.

    Args:
        decide: Called on rank 0 only. Its result must be picklable.

    Returns:
        The result, on all ranks.

    Raises:
        PeerError: The function failed on rank 0. Raised on the other ranks; rank 0 gets its own error.

    Example:
        >>> of_chief(lambda: 3)
        3
    """
    if is_deciding():
        return decide()
    communicator = process_communicator()
    if communicator.rank:
        decided, failure = communicator.broadcast_object(None)
        if failure:
            raise PeerError(f"Rank 0 failed where it decides for all: {failure}\nHint: its traceback is in its output.")
        return decided
    _here.is_deciding = True
    try:
        decided = decide()
    except Exception as error:
        communicator.broadcast_object((None, f"{type(error).__name__}: {error}"))
        raise
    finally:
        _here.is_deciding = False
    communicator.broadcast_object((decided, ""))
    return decided


def refuse_different_ends(what: str, end: str, error: str = "") -> None:
    """Compares how something ended on the ranks. All ranks must call it.

    Args:
        what: Its name, such as "Trial 3".
        end: How it ended on this rank, such as "COMPLETED" or "ValueError".
        error: The error's text. It may differ between ranks that fail alike, since it may contain numbers of processes.

    Raises:
        PeerError: It ended differently on some ranks. Raised on all ranks.

    Example:
        >>> refuse_different_ends("Trial 3", "COMPLETED")
    """
    ends, errors = zip(*process_communicator().all_gather_object((end, error)), strict=True)
    if len(set(ends)) > 1:
        other = next(rank for rank, each in enumerate(ends) if each != ends[0])
        descriptions = [": ".join(filter(None, each)) for each in zip(ends, errors, strict=True)]
        raise PeerError(
            message(
                f"{what} did not end in the same way on all ranks.",
                hint="read the error of the rank that failed. A usual cause is a file that only some ranks have.",
                rank_0=descriptions[0],
                **{f"rank_{other}": descriptions[other]},
            )
        )
