"""The command line of a process that runs a module of this package."""

from __future__ import annotations

import json
import sys

# A process finds this package at the place where its launcher found it, in whatever folder it is started. It gets its own search
# path back before the user's script runs.
_BOOTSTRAP = (
    "import json, sys; own = sys.path[:]; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(sys.argv[2:], own)"
)

# Only the first line is read here, so the rest is left for the module.
_PIPED_BOOTSTRAP = (
    'import json, sys; given = json.loads(open(0, "rb", 0, closefd=False).readline()); sys.path[:] = given.pop("path"); '
    "from {module} import main; main(given)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line of a process that calls the `main` of a module.

    Args:
        module: Full name of the module. Its `main` gets the arguments, and the search path with which Python started.
        *arguments: The arguments.

    Returns:
        The command line.

    Example:
        >>> module_command("tfrep_strategy.running.script", "notes", "", "script", "train.py")[1]
        '-c'
    """
    return [sys.executable, "-c", _BOOTSTRAP.format(module=module), json.dumps(search_path()), *arguments]


def search_path() -> list[str]:
    """Returns the folders where Python looks for modules, without entries that are not text.

    Example:
        >>> sys.path.append(Path("no text"))
        >>> any(each == "no text" for each in map(str, search_path()))
        False
        >>> del sys.path[-1]
    """
    return [each for each in sys.path if isinstance(each, str)]


def piped_command(module: str) -> list[str]:
    """Returns the command line of a process that gets its arguments through standard input, since other users can read command
    lines.

    Args:
        module: Full name of the module. Its `main` gets the content of the first line, a dictionary in JSON. Its entry `path`
            becomes the search path.

    Returns:
        The command line.

    Example:
        >>> len(piped_command("tfrep_strategy.running.on_host"))
        3
    """
    return [sys.executable, "-c", _PIPED_BOOTSTRAP.format(module=module)]
