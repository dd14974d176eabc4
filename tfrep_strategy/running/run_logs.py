"""The folder of a run's logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfrep_strategy.running.failures import RunFailed
from tfrep_strategy.validation import writable


def rank_logs(log_dir: Path, first_rank: int, ranks: int) -> dict[int, Path]:
    """Returns where the ranks of a machine write, or would.

    Args:
        log_dir: Folder of the logs.
        first_rank: The first of them.
        ranks: How many there are.

    Example:
        >>> [log.name for log in rank_logs(Path("logs"), 4, 2).values()]
        ['rank4.log', 'rank5.log']
    """
    return {rank: log_dir / f"rank{rank}.log" for rank in range(first_rank, first_rank + ranks)}


def remove_logs(logs: Mapping[int, Path]) -> None:
    """Removes logs of an earlier run, which would be taken for those of a new one, but not where this process writes itself.

    Example:
        >>> remove_logs(rank_logs(Path(), 0, 2))
    """
    own = [os.fstat(descriptor) for descriptor in (1, 2)]
    for log in filter(Path.exists, logs.values()):
        if not any(os.path.samestat(log.stat(), each) for each in own):
            log.unlink()


@contextlib.contextmanager
def log_folder(wanted: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Makes the folder of a run's logs. A temporary one is left if a rank has failed, for who wants to know why.

    Raises:
        ConfigurationError: It cannot be made.
    """
    log_dir, is_left = make_log_dir(wanted), wanted is not None
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


def make_log_dir(wanted: str | os.PathLike[str] | None) -> Path:
    """Returns the folder that logs are written to; a temporary one where none is wanted.

    Raises:
        ConfigurationError: It cannot be made.
    """
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="tfrep-logs-"))
    return writable("log_dir", wanted)
