"""The package's exceptions and warnings, and the format of their messages.

A message says what happened, then what was received, then what to do::

    Unknown communicator. Received: communicator='nccl'
    Hint: use "auto", "horovod" or "tf". [TFREP-E005]

A code at the end leads to `docs/troubleshooting.md`.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

LONGEST_SECONDS = 30 * 24 * 3600
"""The longest time that a setting may name. The system's calls refuse what is much longer."""

_LONGEST_VALUE = 500

CODES = {
    "TFREP-E001": "Keras uses another backend than TensorFlow.",
    "TFREP-E002": "A model or an optimizer is one of Keras 2, TensorFlow 1 or Horovod.",
    "TFREP-E003": "A version of TensorFlow, Keras or Horovod does not fit, or ranks have different versions.",
    "TFREP-E004": "TensorFlow was used before its CPUs were divided.",
    "TFREP-E005": "There is no such communicator, or it is not installed.",
    "TFREP-E006": "Ranks cannot use shared memory.",
    "TFREP-E007": "Another launcher has started this process as one of several.",
    "TFREP-E008": "A setting cannot change after the strategy is made.",
    "TFREP-E009": "The driver sees a GPU, and TensorFlow does not.",
    "TFREP-E010": "There is no such device.",
    "TFREP-E011": "A GPU is busy, or has no memory left.",
    "TFREP-E012": "A host cannot be reached through ssh, or has another installation.",
    "TFREP-E013": "Not all ranks came to the rendezvous in time.",
    "TFREP-E014": "The port of the rendezvous is taken, or belongs to another run.",
    "TFREP-E015": "The secret of the run is missing, too short, or readable by others.",
    "TFREP-E016": "A model, an optimizer or a metric was made outside the scope of the strategy.",
    "TFREP-E017": "A collective was given up, because a rank did not come within `TFREP_TIMEOUT`.",
    "TFREP-E018": "A rank has ended, so the others cannot go on.",
    "TFREP-E019": "Ranks call different collectives, or run different steps.",
    "TFREP-E020": "Ranks were given different data.",
    "TFREP-E021": "Ranks make different variables, or shuffle in different orders.",
    "TFREP-E022": "Variables of replicas differ.",
    "TFREP-E023": "Operations of a step cannot be split among replicas.",
    "TFREP-E024": "No backup in the folder is whole.",
}
"""The codes of errors and warnings that `docs/troubleshooting.md` explains, each with what happened. A code keeps its meaning."""

_CODE = re.compile(r"\[(TFREP-E\d{3})\]")


def code_of(text: object) -> str | None:
    """Returns the code that an error, a warning or their text has, or None.

    Args:
        text: The error, or its text.

    Example:
        >>> code_of("There is no device 'GPU:7'. [TFREP-E010]")
        'TFREP-E010'
    """
    found = _CODE.search(str(text))
    return found[1] if found else None


class TfrepError(Exception):
    """Base class of this package's exceptions."""

    # AutoGraph adds the user's lines to an error, and keeps its class, only if the class has this constructor.
    __init__ = Exception.__init__

    @property
    def code(self) -> str | None:
        """The code under which `docs/troubleshooting.md` explains the error, such as `"TFREP-E010"`; None if it has none."""
        return code_of(self)


class CannotPartitionError(TfrepError, RuntimeError):
    """A step of one device does what there is no way to do on replicas."""


class ConfigurationError(TfrepError, ValueError):
    """A setting, an argument or an environment variable cannot be used."""


class UnsupportedVersionError(TfrepError, ImportError):
    """The installed TensorFlow, Keras or Horovod lacks a feature that this package needs."""


class PeerError(TfrepError, RuntimeError):
    """Another process of this run died, hung, or does something else than this one."""


class DesyncError(PeerError):
    """Replicas called different collectives, or hold different values."""


class WorkerError(PeerError):
    """A worker of a parameter-server cluster raised an error, or no worker is left."""


class ServerLostError(PeerError):
    """A parameter server has ended, and its variables are lost."""


class HookError(TfrepError, RuntimeError):
    """A hook of an estimator raised an error, on this rank or on another."""


# Whose lines a warning does not name: they called what the user's program has called.
_INNER_MODULES = ("tfrep_strategy", "keras", "tensorflow", "contextlib", "functools", "importlib", "threading")


def warn(text: str) -> None:
    """Warns at the line of the user's program that led here, with a `UserWarning`.

    Args:
        text: What is said, as `message` formats it.
    """
    caller: Any = sys._getframe(1)
    frame = caller
    while frame is not None and _is_inner(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    frame = frame or caller  # A thread of a replica begins in this package.
    names, registry = frame.f_globals, frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)


def _is_inner(module: str) -> bool:
    return module.partition(".")[0] in _INNER_MODULES or module.startswith("__autograph_generated")


def message(what: str, hint: Any = None, *, code: str = "", **received: Any) -> str:
    """Formats an error message.

    Args:
        what: What happened, as a sentence with a full stop.
        hint: What the user can do, if that is known.
        code: One of `CODES`, if the page on troubleshooting explains the error.
        **received: The wrong settings, shown as `name=value`.

    Returns:
        The message, of up to two lines.

    Example:
        >>> print(message("No such rank.", hint="use 0 or 1.", root=7))
        No such rank. Received: root=7
        Hint: use 0 or 1.
    """
    text = what
    if received:
        text += " Received: " + ", ".join(f"{name}={shown(value)}" for name, value in received.items())
    if hint:
        text += f"\nHint: {hint}"
    return f"{text} [{code}]" if code else text


def install_hint(extra: str) -> str:
    """Returns the hint that installs the packages of an extra.

    No index has the package. A hint that names it would install any package that is registered under that name.

    Args:
        extra: The name of the extra in `pyproject.toml`.

    Returns:
        The hint, which ends with the command.

    Example:
        >>> install_hint("mpi")
        "in a clone of the repository: pip install '.[mpi]'"
    """
    return f"in a clone of the repository: pip install '.[{extra}]'"


def shown(value: Any) -> str:
    """Returns what a message shows of a value: its `repr`, shortened.

    Args:
        value: The value.

    Example:
        >>> shown(["a", 1])
        "['a', 1]"
    """
    try:
        text = repr(value)
    except Exception:  # It is nested too deeply, has too many digits, or is broken.
        return f"<{type(value).__name__} that cannot be shown>"
    return shortened(text)


def shortened(text: str) -> str:
    """Returns a text, of which the middle is left out where it is long.

    Example:
        >>> shortened("12345")
        '12345'
    """
    half = _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[:half]}...{text[-half:]} ({len(text)} characters)"


def is_count(value: Any, minimum: int = 1, maximum: int | None = None) -> bool:
    """Tells whether a setting is a whole number between two limits, which belong to it; a bool is none.

    Args:
        value: The setting.
        minimum: The smallest that is allowed.
        maximum: The largest that is allowed; None: there is none.

    Returns:
        Whether it is.

    Example:
        >>> is_count(2), is_count(0), is_count(2.0), is_count(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= minimum and (maximum is None or value <= maximum)


def check_count(what: str, minimum: int = 1, maximum: int | None = None, **setting: Any) -> None:
    """Refuses a setting that is no whole number between two limits, see `is_count`.

    Args:
        what: What the error says, as a sentence with a full stop.
        minimum: The smallest that is allowed.
        maximum: The largest that is allowed; None: there is none.
        **setting: One setting, as `name=value`.

    Raises:
        ConfigurationError: if it is refused.

    Example:
        >>> check_count("A run has at least one step.", steps=0)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: A run has at least one step. Received: steps=0
        Hint: use a whole number, 1 or more.
    """
    (value,) = setting.values()
    if not is_count(value, minimum, maximum):
        numbers = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigurationError(message(what, hint=f"use a whole number, {numbers}.", **setting))


def check_seconds(**setting: Any) -> None:
    """Refuses a time that is not a positive number of seconds, of 30 days at most.

    Args:
        **setting: One setting, as `name=value`.

    Raises:
        ConfigurationError: if it is refused.

    Example:
        >>> check_seconds(timeout=-1)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: timeout must be a positive number of seconds. Received: timeout=-1
        Hint: use a number such as 60, up to 2592000.
    """
    ((name, value),) = setting.items()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_SECONDS:
        hint = f"use a number such as 60, up to {LONGEST_SECONDS}."
        raise ConfigurationError(message(f"{name} must be a positive number of seconds.", hint=hint, **setting))
