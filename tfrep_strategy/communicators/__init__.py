"""How replicas in different processes talk: one contract, one file per transport."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.communicators.base import REDUCE_OPS, Communicator
from tfrep_strategy.communicators.single import SingleCommunicator

__all__ = ["REDUCE_OPS", "Communicator", "SingleCommunicator", "make_communicator"]


def make_communicator(name: str | Communicator, environment: Any, device: str | None = None) -> Communicator:
    """Makes the communicator that `name` asks for.

    Args:
        name: `"auto"`, `"horovod"`, `"tf"`, or a `Communicator`, which is returned as it is.
        environment: The `Environment` that tells rank, size and addresses.
        device: Device string on which TensorFlow's collectives run. Default: chosen by the local rank.

    Returns:
        A `Communicator`.

    Raises:
        ConfigurationError: for an unknown name, or one that this environment cannot serve.
    """
    from tfrep_strategy.errors import ConfigurationError, message

    if isinstance(name, Communicator):
        return name
    if name not in ("auto", "horovod", "tf"):
        raise ConfigurationError(
            message("Unknown communicator.", hint='use "auto", "horovod", "tf" or a tfrep.Communicator.', communicator=name)
        )
    from tfrep_strategy.communicators import horovod

    if name == "auto":
        started_for_horovod = environment.name in ("horovod", "mpi") and horovod.is_installed()
        name = "horovod" if started_for_horovod else "tf"
    if name == "horovod":
        return horovod.HorovodCommunicator()
    if environment.size == 1:
        return SingleCommunicator()
    from tfrep_strategy.communicators.tf_collective import TensorFlowCommunicator

    return TensorFlowCommunicator(environment, device)
