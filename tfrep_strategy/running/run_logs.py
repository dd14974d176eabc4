"""The folder of a run's logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tfrep_strategy.running.failures import RunFailed
from tfrep_strategy.validation import writable


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
