"""Who is this process, and who are the others: one small class for each thing that starts processes."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.environments.base import Environment
from tfrep_strategy.environments.horovod import HorovodEnvironment
from tfrep_strategy.environments.mpi import MpiEnvironment
from tfrep_strategy.environments.single import SingleEnvironment
from tfrep_strategy.environments.slurm import SlurmEnvironment
from tfrep_strategy.environments.tf_config import TfConfigEnvironment

__all__ = [
    "Environment",
    "HorovodEnvironment",
    "MpiEnvironment",
    "SingleEnvironment",
    "SlurmEnvironment",
    "TfConfigEnvironment",
    "detect_environment",
    "identity_variables",
    "register_environment",
]

# From the most particular to the most general: a launcher inside a Slurm job speaks for its processes, Slurm does not.
_environments: list[type[Environment]] = [
    HorovodEnvironment,
    MpiEnvironment,
    TfConfigEnvironment,
    SlurmEnvironment,
    SingleEnvironment,
]


def detect_environment() -> Environment:
    """Finds out what started this process.

    The first that detects itself wins: registered ones (the latest first), Horovod, MPI, `TF_CONFIG`, Slurm, one
    process alone.

    Returns:
        The environment, checked.

    Raises:
        ConfigurationError: The environment that detected itself is described badly.

    Example:
        >>> detect_environment().rank
        0
    """
    found: Any = next(environment for environment in _environments if environment.detect())
    return found()


def register_environment(environment: type[Environment]) -> type[Environment]:
    """Adds an environment of one's own, ahead of all that are known so far. Works as a class decorator.

    Args:
        environment: The class; it is made without arguments when its `detect` says yes.

    Returns:
        The same class.

    Raises:
        TypeError: It is not a subclass of `Environment`.

    Example:
        >>> @register_environment
        ... class Kubernetes(Environment): ...
    """
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise TypeError(f"register_environment takes a subclass of Environment. Received: {environment!r}")
    if environment not in _environments:
        _environments.insert(0, environment)
    return environment


def identity_variables() -> set[str]:
    """Names every variable by which some environment tells a process who it is.

    Returns:
        The names; a launcher removes them from what it passes on, so that no older run speaks to its processes.

    Example:
        >>> "TF_CONFIG" in identity_variables()
        True
    """
    return {variable for environment in _environments for variable in environment.variables}
