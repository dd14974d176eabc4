"""The package's exceptions, and the one shape that their messages have.

A message says what happened, then what was received, then what to do::

    Unknown communicator. Received: communicator='mpi'
    Hint: use "auto", "horovod" or "tf".
"""

from __future__ import annotations

from typing import Any


class TfrepError(Exception):
    """Base of every exception that this package raises on its own account."""

    # AutoGraph raises an error of the same class, with the user's lines added, only where it finds this very constructor.
    __init__ = Exception.__init__


class ConfigurationError(TfrepError, ValueError):
    """A setting, an argument or an environment variable cannot be used."""


class UnsupportedVersionError(TfrepError, ImportError):
    """The installed TensorFlow, Keras or Horovod lacks something that this package relies on."""


class PeerError(TfrepError, RuntimeError):
    """Another process of this run died, hung, or does not fit to this one."""


class DesyncError(PeerError):
    """Replicas called different collectives, or hold different values."""


class WorkerError(PeerError):
    """A worker of a parameter-server cluster raised an error, or no worker is left."""


class ServerLostError(PeerError):
    """A parameter server is gone, and the variables with it."""


def message(what: str, hint: Any = None, **received: Any) -> str:
    """Formats an error message.

    Args:
        what: What happened, as a sentence with a full stop.
        hint: What to do about it, if anything can be said.
        **received: The offending settings, shown as `name=value`.

    Returns:
        The message, of up to two lines.

    Example:
        >>> print(message("No such rank.", hint="use 0 or 1.", root=7))
        No such rank. Received: root=7
        Hint: use 0 or 1.
    """
    text = what
    if received:
        text += " Received: " + ", ".join(f"{name}={value!r}" for name, value in received.items())
    if hint:
        text += f"\nHint: {hint}"
    return text
