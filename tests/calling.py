"""Calls functions of test modules in processes of their own: `python calling.py SYS_PATH MODULE FUNCTION ARGUMENTS...`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable


def command(fn: Callable[..., object], *arguments: str) -> list[str]:
    """Returns the command line of a process that calls a function.

    Args:
        fn: Stands at the top of a module that can be imported as in this process.
        *arguments: Its arguments.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return [sys.executable, __file__, json.dumps(path), fn.__module__, fn.__name__, *arguments]


if __name__ == "__main__":
    _, path, module, name, *given = sys.argv
    sys.path[:] = json.loads(path)
    getattr(importlib.import_module(module), name)(*given)
