"""The events of a run, as lines of JSON in `events.jsonl` beside its logs, for programs that watch it.

The launcher writes `start`, `loss`, `restart` and `end`; rank 0 writes `ready`, `step` and `backup`. Each line has its `time`: the
seconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "events.jsonl"
VARIABLE = "TFREP_EVENTS"
"""The variable with the path of the file, for rank 0."""

STEP_SECONDS = 10.0
"""The time between two reports of steps. The first step of each `fit` is reported as well."""


class Events:
    """The file of a run.

    Args:
        path: The path; None for no file.

    Example:
        >>> events = Events(Path("events.jsonl"))
        >>> events.tell("loss", rank=1)
        >>> sorted(json.loads(Path("events.jsonl").read_text()))
        ['event', 'rank', 'time']
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def tell(self, event: str, **about: Any) -> None:
        """Appends a complete line. If the disk is full, lines are lost, and the run continues."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **about}) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)


class Steps:
    """Reports some steps of one `fit`.

    Args:
        fit: The number of the `fit`, from 0.
    """

    def __init__(self, fit: int) -> None:
        self._fit, self._next = fit, 0.0

    def note(self, done: int) -> None:
        """Records the number of steps done before the one that begins."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + STEP_SECONDS
            of_run().tell("step", fit=self._fit, step=done)


def of_run() -> Events:
    """Returns the file of the run on rank 0. Other processes have none."""
    path = os.environ.get(VARIABLE)
    return Events(Path(path) if path else None)
