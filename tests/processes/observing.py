"""Finding processes, and waiting for things to happen."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil


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
