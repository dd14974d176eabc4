"""A request to end (SIGTERM) while `fit` trains: it is kept until a backup is made."""

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
def keeping_sigterm() -> Iterator[None]:
    """Keeps SIGTERM while the body runs, once `answer_sigterm` was called.

    If nobody has answered it by the end of the body, it does then what it does otherwise. A program that has a handler of its own
    keeps it. Python gives signals to the main thread alone.

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


def answer_sigterm() -> None:
    """Says that the caller will ask `is_asked_to_end` until the body of `keeping_sigterm` ends."""
    _is_answered.set()


def is_asked_to_end() -> bool:
    """Returns whether SIGTERM has come."""
    return _asked.is_set()


def end_as_asked() -> None:
    """Ends this process.

    Raises:
        SystemExit: Always, with `EXIT_CODE`.
    """
    _asked.clear()
    raise SystemExit(EXIT_CODE)


def _keep(number: int, frame: object) -> None:
    if _is_answered.is_set() and not _asked.is_set():
        _asked.set()
    else:  # Nobody would answer, or somebody is impatient.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
