"""How replicas in different processes talk: one contract, one file per transport."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.base import REDUCE_OPS, Communicator
from tfrep_strategy.communicators.single import SingleCommunicator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.transports import choose_communicator, horovod_transports

__all__ = ["REDUCE_OPS", "Communicator", "SingleCommunicator", "make_communicator"]


def make_communicator(name: str | Communicator, environment: Any, device: str | None = None) -> Communicator:
    """Makes the communicator that `name` asks for, and checks that it reaches the processes of the environment.

    Args:
        name: `"horovod"`, `"tf"`, a `Communicator`, which is returned as it is, or `"auto"`: TensorFlow's collectives
            where the environment tells the address of every process, else Horovod, which finds the processes itself.
        environment: The `Environment` that tells rank, size and addresses.
        device: Device string on which TensorFlow's collectives run. Default: chosen by the local rank.

    Returns:
        A `Communicator`.

    Raises:
        ConfigurationError: for an unknown name, one that this environment cannot serve, or a communicator whose rank or
            size is not that of the environment.
    """
    communicator = name if isinstance(name, Communicator) else _named(name, environment, device)
    _check_place(communicator, environment)
    return communicator


def _named(name: str, environment: Any, device: str | None) -> Communicator:
    if name not in ("auto", "horovod", "tf"):
        raise ConfigurationError(
            message("Unknown communicator.", hint='use "auto", "horovod", "tf" or a tfrep.Communicator.', communicator=name)
        )
    if name != "tf":
        by_address = name == "auto" and (environment.size == 1 or environment.addresses)
        choice = choose_communicator(
            horovod_transports(),
            gpus=bool(tf.config.get_visible_devices("GPU")),
            reachable=("tf",) if by_address else ("horovod",),
        )
        if choice.hint and environment.rank == 0:
            warnings.warn(choice.describe(), stacklevel=4)
        name = choice.communicator
    if name == "horovod":
        from tfrep_strategy.communicators.horovod import HorovodCommunicator

        return HorovodCommunicator()
    if environment.size == 1:
        return SingleCommunicator()
    from tfrep_strategy.communicators.tf_collective import TensorFlowCommunicator

    return TensorFlowCommunicator(environment, device)


def _check_place(communicator: Communicator, environment: Any) -> None:
    """Refuses a communicator that reaches other processes than those that were started: each would train alone."""
    told, found = (environment.rank, environment.size), (communicator.rank, communicator.size)
    if environment.size == 1 or told == found:
        return
    raise ConfigurationError(
        message(
            f"By {environment.name} this process is rank {told[0]} of {told[1]},"
            f" but its communicator says rank {found[0]} of {found[1]}.",
            hint="start the processes with what the communicator knows: Horovod knows horovodrun and `tfrep run`, and"
            " mpirun and srun only if it was built with MPI (`tfrep horovod install --with mpi`). For processes that should"
            f" be alone, unset {', '.join(environment.found) or 'the variables of the environment'}.",
            communicator=communicator.name,
            environment=environment.describe(),
        )
    )
