"""What a user is told about a run that failed."""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from pathlib import Path

from tfrep_strategy.processes.ranks import Failure
from tfrep_strategy.startup_log import log_lines

_LAST_LINES, _LAST_BYTES = 20, 1 << 20
_OF_TENSORFLOW = re.compile(log_lines("IW"))


class RunFailed(Exception):  # noqa: N818
    """A run that did not end well; its text is the story for the user.

    Args:
        story: What happened.
        failure: Who failed, and how.
        log_dir: Folder of the log files; None if each host has its own.
        was_lost: Whether a rank or a host was lost, so that the run may end well if it is started again.

    Example:
        >>> print(RunFailed("Rank 0 failed.", Failure(0, 3)))
        Rank 0 failed.
    """

    def __init__(self, story: str, failure: Failure, log_dir: Path | None = None, *, was_lost: bool = False) -> None:
        super().__init__(story)
        self.failure = failure
        self.log_dir = log_dir
        self.was_lost = was_lost


def describe(failure: Failure, *, timeout: float | None, log_dir: Path) -> str:
    """Tells which rank failed, how, and what it said last.

    Args:
        failure: What `run_ranks` returned.
        timeout: The time limit of the run.
        log_dir: Folder of the log files.

    Returns:
        The story, of one line or more.

    Example:
        >>> describe(Failure(0, 3), timeout=None, log_dir=Path("logs"))
        'Rank 0 failed with exit code 3; all ranks were ended. Its output is above.'
    """
    if failure.stopped_by_signal:
        return f"The run was stopped by {signal_name(failure.exit_code - 128)}."
    if failure.rank is None:
        return f"The run was stopped: it took more than {timeout:g} seconds.\nLogs: {log_dir}"
    code = failure.exit_code
    by_signal = f" ({signal_name(code - 128)})" if code - 128 in signal.valid_signals() else ""
    what = failure.frozen or f"failed with exit code {code}{by_signal}"
    what = f"Rank {failure.rank} {what}; all ranks were ended."
    if failure.frozen:
        what += " TFREP_TIMEOUT=0 lets them wait, as under a debugger."
    log = log_dir / f"rank{failure.rank}.log"
    if not log.exists():
        return f"{what} Its output is above."
    lines = [*last_lines(log, failure.log_size), *failure.traceback.splitlines()]
    if not lines:
        return f"{what} It wrote nothing.\nLogs: {log_dir}"
    return f"{what} Its last lines:\n" + "".join(f"  {line}\n" for line in lines) + f"Logs: {log_dir}"


def signal_name(number: int) -> str:
    """Returns what a signal is called. Most real-time signals have no name.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def last_lines(log: Path, size: int | None = None) -> list[str]:
    """Returns the last lines of a log that the rank's own program wrote, without TensorFlow's information.

    Args:
        log: The file.
        size: How many bytes of it count. Default: all. No more than the last MiB of them is read.

    Returns:
        The lines; at most 20.

    Example:
        >>> size = Path("rank1.log").write_text("epoch 1\\nepoch 2\\n")
        >>> last_lines(Path("rank1.log"))
        ['epoch 1', 'epoch 2']
    """
    with open(log, "rb") as file:
        end = os.fstat(file.fileno()).st_size if size is None else size
        file.seek(max(0, end - _LAST_BYTES))
        text = file.read(end - file.tell()).decode("utf-8", "replace")
    own = (line.rstrip() for line in text.splitlines() if not _OF_TENSORFLOW.match(line))
    return list(deque(own, _LAST_LINES))
