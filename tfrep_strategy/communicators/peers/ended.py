"""A rank that has ended, and the error that it causes on the other ranks."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import PeerError, message


class PeerLostError(PeerError, tf.errors.UnavailableError):
    """A rank has ended while this one needed it. It is also a `tf.errors.UnavailableError`."""

    def __init__(self, text: str) -> None:
        tf.errors.UnavailableError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return PeerLostError, (self.message,)


class Ended:
    """A rank that has ended.

    Args:
        rank: The rank.
        lost: Whether its connection broke without a goodbye: the process was killed, or called `os._exit`.
        error: The error that ended it, if one did. If it is lost: what its watcher saw of it before it killed it.
    """

    def __init__(self, rank: int, lost: bool, error: str | None) -> None:
        self.rank, self.lost, self.error = rank, lost, error
        self.when = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether it ended before the end of its program."""
        return self.lost or self.error is not None

    @property
    def how(self) -> str:
        """The reason, worded to follow "ended"."""
        if self.lost:
            return f", killed by its watcher: it {self.error}" if self.error else " without a word"
        return f" with {self.error}" if self.error else ""

    def __str__(self) -> str:
        return f"Rank {self.rank} ended {time.monotonic() - self.when:.1f} seconds ago{self.how.rstrip('.')}."


def lost(ended: Ended) -> PeerLostError:
    """Makes the error of a process that cannot go on without a rank that has ended."""
    hint = f"look for the reason in the output of rank {ended.rank}"
    hint += "; the system may have killed it because memory ran out." if ended.lost else "."
    if ended.lost and ended.error:
        hint = "find out who has stopped it, or what it was doing; TFREP_TIMEOUT=0 lets ranks wait, as under a debugger."
    if not ended.failed:
        hint = "every rank has to call the same collectives; its program ended before that of the others."
    return PeerLostError(message(f"{ended} No collective can finish without it.", hint=hint))


def one_line(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its text, which is cut."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= 200 else text[:200] + "..."
