"""Processes that are stopped (SIGSTOP, state T). They cannot tell so themselves; others of their machine see it."""

from __future__ import annotations

import contextlib
import time

import psutil

from tfrep_strategy.limits import timeout_seconds

LOOK_SECONDS = 1.0
"""How often to look."""

_STOPPED_SECONDS = 15.0
"""How long a rank may be stopped. Horovod's own limit is 30 seconds, TensorFlow's between machines 20; after those, others fail."""


def longest_stop() -> float:
    """Returns how many seconds a rank may be stopped; `math.inf` if `TFREP_TIMEOUT` is 0.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` is no number of seconds.

    Example:
        >>> longest_stop()
        15.0
    """
    limit = timeout_seconds()
    return limit if limit == float("inf") else min(_STOPPED_SECONDS, limit / 2)


class StopTimer:
    """Measures for how long a process is stopped.

    Args:
        process: The process.

    Attributes:
        seconds: For how long by now; 0 if it runs.

    Example:
        >>> timer = StopTimer(psutil.Process())
        >>> timer.look(psutil.STATUS_RUNNING, 1.0)
        0.0
    """

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._switches = 0
        self.seconds = 0.0

    def look(self, status: str, passed: float) -> float:
        """Looks once, and returns the seconds.

        Args:
            status: The state of the process, as `psutil` names it.
            passed: Seconds since the last look.

        Raises:
            psutil.Error: The process has ended.
        """
        # What has run since the last look was not stopped all the time.
        before, self._switches = self._switches, sum(self._process.num_ctx_switches())
        is_stopped = status == psutil.STATUS_STOPPED and self._switches == before
        self.seconds = self.seconds + passed if is_stopped else 0.0
        return self.seconds


class OtherProcess:
    """A process of this machine for which nobody should wait if it is stopped.

    Args:
        pid: Its number.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` is no number of seconds.
        psutil.Error: It has ended.

    Example:
        >>> OtherProcess(os.getpid()).look()
        0.0
    """

    def __init__(self, pid: int) -> None:
        self._process, self._most = psutil.Process(pid), longest_stop()
        self._timer, self._last = StopTimer(self._process), time.monotonic()

    def look(self) -> float:
        """Looks once. Returns for how many seconds it is stopped if that is too long, else 0."""
        now = time.monotonic()
        # If this process was itself held up, it cannot know how the other one was meanwhile.
        passed, self._last = min(now - self._last, 2 * LOOK_SECONDS), now
        with contextlib.suppress(psutil.Error):  # It has ended.
            seconds = self._timer.look(self._process.status(), passed)
            return seconds if seconds > self._most else 0.0
        return 0.0

    def kill(self) -> None:
        """Kills it. A process that is stopped does nothing on other signals."""
        with contextlib.suppress(psutil.Error):
            self._process.kill()
