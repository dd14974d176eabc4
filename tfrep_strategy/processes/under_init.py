"""What the first process of a container has to do for the others."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG,
              signal.SIGXCPU)  # fmt: skip
_OTHERS_SECONDS = 3.0


def run_under_init(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command as a child of this process, passes signals on to it, and takes up what processes leave behind.

    The kernel shields the first process of a container (process 1) from signals that it does not handle, from SIGKILL within the
    container too (`man 7 pid_namespaces`). So a rank that is frozen could not be ended there, nor one that does not expect SIGTERM.

    Args:
        command: The path of a program, and its arguments.
        environ: Its variables.

    Returns:
        Its exit code; 128 + n if signal n ended it.

    Example:
        >>> run_under_init(["/bin/sh", "-c", "exit 3"], os.environ)
        3
    """
    child = os.spawnve(os.P_NOWAIT, command[0], list(command), environ)

    def pass_on(number: int, frame: object) -> None:
        if number == signal.SIGINT and os.isatty(0):  # A terminal sends Ctrl-C to all of its processes.
            return
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            os.kill(child, number)

    previous = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        while True:
            pid, status = os.wait()
            if pid == child:
                _let_others_end()
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _let_others_end() -> None:
    """Waits for what the command has left and is about to end, such as its watcher. The kernel kills all when process 1 ends."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
