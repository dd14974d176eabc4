"""Finding processes, and waiting for things to happen: functions, and fixtures for the tests that start processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

from tfrep_strategy.cluster import signs_of_life


def alive(marker: str) -> list[psutil.Process]:
    """Lists the processes whose command line holds the marker; this process is not among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(marker in part for part in process.cmdline()):
                found.append(process)
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition; fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def has_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that another test of this process has given signs to a launcher."""
    monkeypatch.setattr(signs_of_life, "_is_watched", threading.Event())


@pytest.fixture
def marker() -> Iterator[str]:
    """A word for the command lines of a test's processes; none that carries it may outlive the test."""
    word = f"marker-{uuid.uuid4().hex}"
    yield word
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not alive(word), 10.0)
    left = alive(word)
    for process in left:
        process.kill()
    assert not left
