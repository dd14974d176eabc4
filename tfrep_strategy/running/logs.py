"""The output of ranks, which is shown line by line and kept in the folder of a run; and the words about a run that failed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tfrep_strategy.cluster.startup_log import log_lines
from tfrep_strategy.core.validation import writable
from tfrep_strategy.running.ranks import Failure

_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def lines_shown(logs: Mapping[str, Path], *, only_new: bool = False) -> Iterator[None]:
    """Shows the lines of growing files on the standard output while the body runs, and what is left at its end.

    Args:
        logs: The files, by what stands before their lines. They need not exist yet.
        only_new: Whether what they contain already is left out.

    Yields:
        Nothing.

    Example:
        >>> with lines_shown({"[1] ": Path("rank1.log")}):
        ...     size = Path("rank1.log").write_text("ready")
        [1] ready
    """
    files = [_Growing(path, prefix, path.stat().st_size if only_new and path.exists() else 0) for prefix, path in logs.items()]
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_SECONDS):
            for file in files:
                file.show()

    thread = threading.Thread(target=follow, daemon=True, name="tfrep-output")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for file in files:
            file.show(is_complete=True)


class _Growing:
    """A file to which another process writes, and of which so many bytes were shown."""

    def __init__(self, path: Path, prefix: str, shown: int) -> None:
        self._path, self._prefix = path, prefix
        self._shown, self._rest = shown, b""

    def show(self, is_complete: bool = False) -> None:
        """Shows the lines that have come; with `is_complete` also a last one without an end."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._shown)
            new = file.read()
            self._shown += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            if is_complete and self._rest:
                lines.append(self._rest)
            with contextlib.suppress(OSError, ValueError):  # The reader has gone. The run goes on, and the logs have it all.
                for line in lines:
                    _write(f"{self._prefix}{line.decode('utf-8', 'replace')}\n")
                sys.stdout.flush()


def _write(text: str) -> None:
    """Writes to the standard output. What its encoding does not have becomes question marks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


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


def describe(failure: Failure, *, timeout: float | None, log_dir: Path, size: int = 1) -> str:
    """Tells which rank failed, how, and what it said last.

    Args:
        failure: What `run_ranks` returned.
        timeout: The time limit of the run.
        log_dir: Folder of the log files.
        size: How many ranks the run has, on all machines.

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
    its = "Its"
    if failure.alike:
        what = f"{_named(failure.alike, size)} raised {failure.error}, and the run was ended."
        if 0 in failure.alike and not (log_dir / "rank0.log").exists():
            return f"{what} The output of rank 0 is above.\nLogs: {log_dir}"
        its = f"Rank {failure.rank}'s"
    if code - 128 == signal.SIGKILL and not failure.frozen:
        what += " The kernel sends SIGKILL to a process when memory is full."
    if failure.frozen:
        what += " TFREP_TIMEOUT=0 lets them wait, as under a debugger."
        what = "\n".join([what, *failure.where])
    log = log_dir / f"rank{failure.rank}.log"
    if not log.exists():
        return f"{what} {its} output is above."
    lines = [*last_lines(log, failure.log_size), *failure.traceback.splitlines()]
    if not lines:
        return f"{what} It wrote nothing.\nLogs: {log_dir}"
    return f"{what} {its} last lines:\n" + "".join(f"  {line}\n" for line in lines) + f"Logs: {log_dir}"


def _named(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "Both ranks" if size == 2 else f"All {size} ranks"
    *others, last = map(str, ranks)
    return f"Ranks {', '.join(others)} and {last}"


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


def remove_logs(logs: Iterable[Path]) -> None:
    """Removes logs of an earlier run, which would be taken for those of a new one, but not where this process writes itself.

    Example:
        >>> remove_logs([Path("rank0.log")])
    """
    own = [os.fstat(descriptor) for descriptor in (1, 2)]
    for log in filter(Path.exists, logs):
        if not any(os.path.samestat(log.stat(), each) for each in own):
            log.unlink()


@contextlib.contextmanager
def log_folder(wanted: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Makes the folder of a run's logs. A temporary one is left if a rank has failed, for who wants to know why.

    Raises:
        ConfigurationError: It cannot be made.
    """
    is_left = wanted is not None
    log_dir = Path(tempfile.mkdtemp(prefix="tfrep-logs-")) if wanted is None else writable("log_dir", wanted)
    try:
        yield log_dir
    except RunFailed as failed:
        is_left = is_left or failed.was_lost or not failed.failure.stopped_by_signal
        raise
    except Exception:
        is_left = is_left or any(log_dir.glob("rank*.log"))
        raise
    finally:
        if not is_left:
            shutil.rmtree(log_dir, ignore_errors=True)
