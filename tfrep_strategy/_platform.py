"""Refuses systems that cannot run the package, before anything is imported that they lack."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

_MODULES = ("fcntl", "resource")
_FUNCTIONS = {"os.register_at_fork": os, "signal.SIGKILL": signal}


def missing() -> list[str]:
    """Returns what the package needs and this system lacks.

    Example:
        >>> missing()
        []
    """
    modules = [name for name in _MODULES if find_spec(name) is None]
    return modules + [name for name, owner in _FUNCTIONS.items() if not hasattr(owner, name.partition(".")[2])]


def refuse_other_systems() -> None:
    """Refuses a system that is not POSIX, such as Windows, for which TensorFlow has wheels.

    The command `tfrep` ends with the sentence alone. A program gets an error.

    Raises:
        ImportError: Something is missing. A class of this package would not do, since the package cannot be imported.
    """
    if lacking := missing():
        text = f"tfrep_strategy needs Linux, and Python on {sys.platform} has no {', '.join(lacking)}: on Windows, use WSL2."
        if os.path.basename(sys.argv[0]).partition(".")[0] == "tfrep":
            sys.exit(text)
        raise ImportError(text)
