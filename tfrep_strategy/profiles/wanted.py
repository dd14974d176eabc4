"""Which steps a run traces, and where the traces go."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from tfrep_strategy.validation import checked, variable, writable

_SKIPPED = 5
"""Steps before those that are traced, if only their number is given. The first ones are compiled, and fill caches."""
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class TracedSteps:
    """Steps of a `fit`, counted from 0.

    Attributes:
        first: The first step that is traced.
        end: The first step after them that is not.
    """

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


def _steps(given: str) -> TracedSteps:
    numbers = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", given)
    if numbers is None:
        raise ValueError("write the number of steps, or FROM:TO")
    first = _SKIPPED if numbers[1] is None else int(numbers[1])
    end = int(numbers[2]) + (first if numbers[1] is None else 0)
    if not 0 < end - first <= _MOST_STEPS:
        raise ValueError(f"from 1 to {_MOST_STEPS} steps can be traced")
    return TracedSteps(first, end)


_Steps = Annotated[TracedSteps, BeforeValidator(_steps)]


def traced_steps(profile: str) -> TracedSteps:
    """Reads the steps that a user wants to be traced.

    Args:
        profile: How many steps, or "FROM:TO": from step FROM up to, but without, step TO.

    Returns:
        The steps. Without FROM they begin after the first five.

    Raises:
        ConfigurationError: This is not so, or these are no steps.

    Example:
        >>> traced_steps("10"), traced_steps("20:30")
        (TracedSteps(first=5, end=15), TracedSteps(first=20, end=30))
    """
    return checked(_Steps, "profile", profile, hint='e.g. "10": ten steps, or "20:30": from step 20 up to step 29.')


def steps_of_environment() -> TracedSteps | None:
    """Returns the steps that `TFREP_PROFILE` names, which `tfrep run --profile` sets; None if it is not set.

    Raises:
        ConfigurationError: `TFREP_PROFILE` names no steps.

    Example:
        >>> os.environ["TFREP_PROFILE"] = "20:30"
        >>> print(steps_of_environment())
        20:30
    """
    return variable(_Steps, "TFREP_PROFILE", default=None)


def folder_of_environment() -> Path:
    """Returns the folder for traces: `TFREP_PROFILE_DIR`, by default `tfrep-profile` in the current folder.

    Example:
        >>> folder_of_environment().name
        'tfrep-profile'
    """
    return Path(os.environ.get("TFREP_PROFILE_DIR") or "tfrep-profile").absolute()


def profile_folder(profile_dir: str | os.PathLike[str] | None, log_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder for traces of a run that this process starts.

    Args:
        profile_dir: The one that the user wants, if any.
        log_dir: The one for logs that the user wants, if any. The default is in it.

    Returns:
        Its absolute path. It is not made.

    Example:
        >>> profile_folder(None, "logs").parts[-2:]
        ('logs', 'profile')
    """
    if profile_dir is not None:
        return Path(profile_dir).absolute()
    return folder_of_environment() if log_dir is None else Path(log_dir).absolute() / "profile"


def profile_environ(profile: str | None, folder: Path) -> dict[str, str]:
    """Makes the folder for traces, if steps are to be traced, and returns the variables that tell the processes of a run.

    Args:
        profile: The steps, if any.
        folder: The folder for traces.

    Raises:
        ConfigurationError: Nothing can be written there.

    Example:
        >>> profile_environ(None, Path("profile"))
        {}
    """
    if profile is None:
        return {}
    return {"TFREP_PROFILE": profile, "TFREP_PROFILE_DIR": str(writable_folder(folder))}


def writable_folder(folder: Path) -> Path:
    """Makes the folder for traces, if there is none.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: It cannot be made, or nothing can be written there.

    Example:
        >>> writable_folder(Path("profile")).name
        'profile'
    """
    return writable("profile_dir", folder)


def new_run_folder(folder: Path) -> Path:
    """Returns a path for the traces of all processes: each is a host of one run in TensorBoard. The folder is not made.

    Args:
        folder: The folder for traces, which is that of `tensorboard --logdir`.

    Example:
        >>> new_run_folder(Path("profile")).parts[:3]
        ('profile', 'plugins', 'profile')
    """
    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    path, number = folder / "plugins" / "profile" / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}_{number}")
    return path
