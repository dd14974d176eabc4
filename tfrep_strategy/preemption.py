"""A request to end (SIGTERM). While `fit` trains, it is kept until a backup is made."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that ends because it was asked to."""

_asked = threading.Event()
_is_answered = threading.Event()


@contextlib.contextmanager
def keeping_requests() -> Iterator[None]:
    """Keeps requests to end while the body runs, once `answer_requests_to_end` was called.

    If nobody has answered by the end of the body, SIGTERM does then what it does otherwise. A program that has a handler of its own
    for SIGTERM keeps it. Python gives signals to the main thread alone.

    Yields:
        Nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _keep)
    try:
        yield
    finally:
        _is_answered.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _asked.is_set():
            signal.raise_signal(signal.SIGTERM)


def answer_requests_to_end() -> None:
    """Says that the caller will ask `is_asked_to_end` until the body of `keeping_requests` ends."""
    _is_answered.set()


def is_asked_to_end() -> bool:
    """Returns whether a request has come."""
    return _asked.is_set()


def end_as_asked() -> None:
    """Ends this process.

    Raises:
        SystemExit: Always, with `EXIT_CODE`.
    """
    _asked.clear()
    raise SystemExit(EXIT_CODE)


def _keep(number: int, frame: object) -> None:
    if _is_answered.is_set():  # A second request changes nothing: a scheduler may ask both the launcher and the rank.
        _asked.set()
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
