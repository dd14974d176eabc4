"""The rank of this process and the addresses of the others: one small class for each kind of launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from tfrep_strategy.cluster.environments.aws_batch import AwsBatchEnvironment
from tfrep_strategy.cluster.environments.base import Environment, SingleEnvironment
from tfrep_strategy.cluster.environments.keras_distribution import KerasDistributionEnvironment
from tfrep_strategy.cluster.environments.kubernetes import IndexedJobEnvironment, TrainJobEnvironment
from tfrep_strategy.cluster.environments.mpi import HorovodEnvironment, MpiEnvironment
from tfrep_strategy.cluster.environments.slurm import SlurmEnvironment
from tfrep_strategy.cluster.environments.tf_config import TfConfigEnvironment
from tfrep_strategy.cluster.environments.torchrun import TorchrunEnvironment
from tfrep_strategy.errors import ConfigurationError, message

__all__ = [
    "AwsBatchEnvironment",
    "Environment",
    "HorovodEnvironment",
    "IndexedJobEnvironment",
    "KerasDistributionEnvironment",
    "MpiEnvironment",
    "SingleEnvironment",
    "SlurmEnvironment",
    "TfConfigEnvironment",
    "TorchrunEnvironment",
    "TrainJobEnvironment",
    "detect_environment",
    "identity_variables",
    "kind_of_environment",
    "register_environment",
]

# From the most specific to the most general: a launcher inside a Slurm job describes its processes better than Slurm does.
_environments: list[type[Environment]] = [
    HorovodEnvironment,
    MpiEnvironment,
    TfConfigEnvironment,
    TorchrunEnvironment,
    TrainJobEnvironment,
    IndexedJobEnvironment,
    AwsBatchEnvironment,
    SlurmEnvironment,
    KerasDistributionEnvironment,
    SingleEnvironment,
]
_own = frozenset(_environments)


def detect_environment() -> Environment:
    """Detects the launcher of this process.

    The first environment that detects itself is used. The order is: registered environments (the latest first), Horovod,
    MPI, `TF_CONFIG`, torchrun's variables, a TrainJob, an indexed Job, AWS Batch, Slurm, `keras.distribution`'s variables, a single
    process.
    An environment of a single process is refused if another one describes several processes. A registered environment is trusted.

    Returns:
        The environment, checked.

    Raises:
        ConfigurationError: The variables of the detected environment are missing, unreadable or contradictory.

    Example:
        >>> detect_environment().rank
        0
    """
    kind: Any = kind_of_environment()
    found: Environment = kind()
    if found.size == 1 and kind in _own:
        _check_alone(found)
    return found


def _check_alone(found: Environment) -> None:
    """Refuses the description of a single process, such as one left over from another run, in a rank of several."""
    other = next((each for each in _described() if each.size > 1), None)
    if other is not None:
        own, others = ([name for name in one.found if name not in two.found] for one, two in ((found, other), (other, found)))
        raise ConfigurationError(
            message(
                f"{found.name} describes a process that is alone, and {other.name} rank {other.rank} of {other.size}.",
                hint=f"unset {', '.join(own)} if this process is a rank, or unset {', '.join(others)} if it is alone.",
                code="TFREP-E007",
                environment=found.describe(),
                other=other.describe(),
            )
        )


def _described() -> Iterator[Environment]:
    """Yields all readable environments that detect themselves. Kubernetes gives pods of any job their index."""
    for kind in cast("list[Any]", _environments):
        with contextlib.suppress(ConfigurationError):
            if kind.detect():
                yield kind()


def kind_of_environment() -> type[Environment]:
    """Returns the class of the environment that started this process, without reading its description.

    Example:
        >>> kind_of_environment().name
        'single process'
    """
    return next(environment for environment in _environments if environment.detect())


def register_environment(environment: type[Environment]) -> type[Environment]:
    """Adds an environment, ahead of all others. It can be used as a class decorator.

    Args:
        environment: The class. It is called without arguments when its `detect` returns True.

    Returns:
        The same class.

    Raises:
        ConfigurationError: It is not a subclass of `Environment`.

    Example:
        >>> @register_environment
        ... class Kubernetes(Environment): ...
    """
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise ConfigurationError(
            message("register_environment takes a class.", hint="pass a subclass of tfrep.Environment.", environment=environment)
        )
    if environment not in _environments:
        _environments.insert(0, environment)
    return environment


def identity_variables() -> set[str]:
    """Returns the names of all variables that describe a process in some environment.

    Returns:
        The names. A launcher does not pass these variables on, so that its processes do not see the description of another run.

    Example:
        >>> "TF_CONFIG" in identity_variables()
        True
    """
    return {variable for environment in _environments for variable in environment.variables}
