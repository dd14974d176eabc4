"""Keeps TensorFlow's log of its start out of this package's output. Nothing here loads TensorFlow."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from tfrep_strategy.cluster.hardware import gpus_are_visible

# Every start logs these: two libraries register the same thing. Only their mark makes them errors and warnings.
_NEVER_TRUE = r"|.*(Unable to register cu(FFT|DNN|BLAS) factory|computation placer already registered)"
_TRUE_WITH_A_GPU = r"|.*failed call to cuInit"

# A separate process, which also passes on the last words of a process that dies while TensorFlow starts.
_PASS_ON = """
import re, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
chatter = re.compile(sys.argv[1])
for line in sys.stdin.buffer:
    if not chatter.match(line.decode("utf-8", "replace")):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""
_PASS_ON_SECONDS = 5.0


def log_lines(levels: str) -> str:
    """Returns a regular expression for the beginning of lines of TensorFlow's log, and of unmarked lines beside them.

    Args:
        levels: The marks of the lines' levels, of I, W, E and F.

    Example:
        >>> import re
        >>> bool(re.match(log_lines("IW"), "I0000 00:00:1795365687.26 6 port.cc:153] oneDNN custom operations are on."))
        True
    """
    return (
        rf"[{levels}]\d{{4}} \d\d:\d\d:\d\d"
        rf"|\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [{levels}] "
        r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
        r"|To enable the following instructions: "
    )


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Removes TensorFlow's log of its start, except for errors, from this process's standard error.

    TensorFlow's libraries write some lines before they read `TF_CPP_MIN_LOG_LEVEL`. Later the variable decides: it is set
    to 1 (no information) unless the user has set it. If the user has set it to 0, nothing is removed.

    Example:
        >>> with quiet_start():
        ...     import tensorflow as tf
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1") == "0":
        yield
        return
    # With a GPU, a warning may explain why TensorFlow does not use it.
    chatter = (log_lines("I") if gpus_are_visible() else log_lines("IW") + _TRUE_WITH_A_GPU) + _NEVER_TRUE
    sys.stderr.flush()
    own = os.dup(2)
    passing_on = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PASS_ON, chatter], stdin=subprocess.PIPE)
    os.dup2(passing_on.stdin.fileno(), 2)  # type: ignore[union-attr]
    passing_on.stdin.close()  # type: ignore[union-attr]
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)
        with contextlib.suppress(subprocess.TimeoutExpired):  # Another process that was started inside may hold the pipe.
            passing_on.wait(_PASS_ON_SECONDS)
