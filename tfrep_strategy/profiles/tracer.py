"""A trace of this process, in a file of its own beside those of the other processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import tensorflow as tf

from tfrep_strategy.profiles.summary import TraceReport
from tfrep_strategy.profiles.times import WINDOW, times_of


class Trace:
    """Traces this process. An error is reported at the end: a training does not fail because of its profile.

    TensorFlow may need a while to start. What happens from `begin` to `end` counts.

    Args:
        run_folder: The folder for the traces of all processes.
        who: This process, such as "rank0". The file is named after it: TensorFlow's own name is that of the machine only.

    Example:
        >>> trace = Trace(Path("profile"), "rank0")
        >>> trace.begin()
        >>> product = tf.ones([8, 8]) @ tf.ones([8, 8])
        >>> report = trace.end()
        >>> report.who, report.traced > 0, report.problem
        ('rank0', True, '')
    """

    def __init__(self, run_folder: Path, who: str) -> None:
        self._run_folder, self._who = run_folder, who
        self._unfinished = self._problem = ""
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            self._unfinished = tempfile.mkdtemp(prefix=f".{who}-", dir=run_folder)
            tf.profiler.experimental.start(self._unfinished)
        except (OSError, tf.errors.OpError) as error:
            self._problem = str(error)

    def begin(self) -> None:
        """Begins the time that the report is about."""
        self._window = tf.profiler.experimental.Trace(WINDOW)

    def end(self) -> TraceReport:
        """Ends the trace, and gives the file its name.

        Returns:
            What it says.
        """
        try:
            if not self._problem:
                self._window.__exit__(None, None, None)
                tf.profiler.experimental.stop()
                (written,) = Path(self._unfinished).rglob("*.xplane.pb")
                path = self._run_folder / written.name.replace(".xplane.pb", f"_{self._who}.xplane.pb")
                os.replace(written, path)
                return times_of(path, self._who)
        except (OSError, tf.errors.OpError) as error:
            self._problem = str(error)
        finally:
            if self._unfinished:
                shutil.rmtree(self._unfinished, ignore_errors=True)
        return TraceReport(self._who, problem=self._problem)
