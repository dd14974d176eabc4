"""The events of a run: lines of JSON in `events.jsonl` beside its logs, for programs, and two lines for its user.

The launcher writes `start`, `loss`, `restart` and `end`; rank 0 writes `ready`, `step`, `backup` and `fit`. Each line has its
`time`: the seconds since 1970. At the start the user reads which replicas run and where, and at the end how fast the run was.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfrep_strategy.core.limits import is_quiet

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


def is_measured() -> bool:
    """Returns whether this process is rank 0 of a run that says at its end how fast it was."""
    return bool(os.environ.get(VARIABLE)) and not is_quiet()


# For the user.

_has_said = False
"""Whether this process has said what its strategy is. A program may make several."""


def say(line: str) -> None:
    """Shows a line on the standard error."""
    with contextlib.suppress(OSError, ValueError):  # It is closed. The run goes on.
        print(f"tfrep: {line}", file=sys.stderr, flush=True)


def say_strategy(replicas: int, where: str, kind: str, transport: str = "") -> None:
    """Says what a strategy is that the program has made itself, once. In a run that `tfrep` has started its launcher has said it.

    Args:
        replicas: How many there are.
        where: Where they are.
        kind: The kind of their devices: "CPU" or "GPU".
        transport: How processes, or GPUs, communicate.
    """
    global _has_said
    if _has_said or replicas < 2 or is_quiet() or "TFREP_RESTARTS" in os.environ:
        return
    _has_said = True
    say(f"{replicas} replicas {where} ({kind})" + (f", {transport}" if transport else ""))


def how_it_went(path: Path | None, seconds: float) -> str:
    """Returns the line at the end of a run.

    Args:
        path: Its file of events, if there is one. What has been told of each `fit` since the last start counts.
        seconds: How long the run has taken.

    Returns:
        The line. Without a `fit` that was measured it has the time only.

    Example:
        >>> events = Events(Path("told.jsonl"))
        >>> events.tell("fit", seconds=2.0, examples=800, data_wait=0.25)
        >>> how_it_went(Path("told.jsonl"), 9.5)
        'done in 9.5 s; fit: 400 examples/s, 25 % of the time waiting for data'
    """
    fits = [] if path is None else list(_fits_of_last_start(path))
    line = f"done in {_shown_seconds(seconds)}"
    measured = sum(each["seconds"] for each in fits)
    if measured > 0:
        speed = sum(each["examples"] for each in fits) / measured
        waited = sum(each["seconds"] * each["data_wait"] for each in fits) / measured
        line += f"; fit: {_shown_speed(speed)} examples/s, {100 * waited:.0f} % of the time waiting for data"
    return line


def _fits_of_last_start(path: Path) -> Iterator[dict[str, Any]]:
    told = []
    with contextlib.suppress(OSError):
        for line in path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError):  # A full disk has cut it.
                told.append(json.loads(line))
    starts = [i for i, each in enumerate(told) if each["event"] in ("start", "restart")]
    yield from (each for each in told[starts[-1] if starts else 0 :] if each["event"] == "fit")


def _shown_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _shown_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
