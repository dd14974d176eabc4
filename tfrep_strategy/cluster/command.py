"""The command line of a process that runs a module of this package, and whether there is the script that it is to run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys

from tfrep_strategy.errors import ConfigurationError, message

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


def check_script(kind: str, target: str) -> None:
    """Refuses a script, or a module, that Python could not run.

    Args:
        kind: "script" or "module".
        target: Its path or name.

    Raises:
        ConfigurationError: There is none, or it is a folder that Python cannot run.

    Example:
        >>> check_script("module", "json.tool")
    """
    if kind == "module":
        _check_module(target)
    elif not os.path.exists(target):
        hint = f"did you mean {target}.py?" if os.path.isfile(f"{target}.py") else "check the path; for a module use -m."
        raise ConfigurationError(message("There is no such script.", hint=hint, script=target))
    elif os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        scripts = sorted(each for each in os.listdir(target) if each.endswith(".py"))
        example = os.path.join(target, scripts[0] if scripts else "train.py")
        what = "The script is a folder, and it has no __main__.py."
        raise ConfigurationError(message(what, hint=f"name a file in it, such as {example}.", script=target))


def _check_module(name: str) -> None:
    """Looks for a module where `python -m` looks for it. Nothing is imported, so parts of a package are not looked for."""
    first = name.partition(".")[0]
    with_path = name.endswith(".py") or os.sep in name
    if not with_path and first:
        if importlib.machinery.PathFinder.find_spec(first, [os.getcwd()]) or first in sys.modules:
            return
        if importlib.util.find_spec(first):
            return
    hint = "leave -m out for the path of a script." if with_path else "check the name, and that it is installed or in this folder."
    raise ConfigurationError(message("There is no such module.", hint=hint, module=name))
