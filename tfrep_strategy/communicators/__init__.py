"""Communication between replicas in different processes: one contract, one file per transport."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.environments import MpiEnvironment
from tfrep_strategy.cluster.rendezvous.introductions import differing, versions
from tfrep_strategy.cluster.transports import (
    OWN_COMMUNICATORS,
    choose_communicator,
    communicator_names,
    factory_of,
    horovod_transports,
    register_communicator,
    unknown_communicator,
    wanted_communicator,
)
from tfrep_strategy.communicators.base import REDUCE_OPS, Communicator, SingleCommunicator
from tfrep_strategy.errors import ConfigurationError, message, warn

__all__ = ["REDUCE_OPS", "Communicator", "SingleCommunicator", "make_communicator", "register_communicator"]


def make_communicator(name: str | Communicator, environment: Any, device: str | None = None) -> Communicator:
    """Makes a communicator by name, and checks that it connects the processes of the environment.

    Args:
        name: `"horovod"`, `"tf"`, `"mpi"`, `"shared_memory"`, `"auto"`, a name given to `register_communicator`, or a
            `Communicator`, which is returned. `"auto"` is the communicator in `TFREP_COMMUNICATOR`, which `tfrep run` sets.
            Without it, `"auto"` is TensorFlow's collectives if the environment can tell the address of every process, else
            Horovod, which finds the processes itself, or MPI if `mpirun` started them and Horovod has no MPI. Processes that
            could use TensorFlow's collectives use shared memory instead if all can share memory and none has a GPU.
        environment: The `Environment` with rank, size and addresses.
        device: Device that TensorFlow's collectives run on. Default: chosen by the local rank.

    Returns:
        A `Communicator`.

    Raises:
        ConfigurationError: The name is unknown, the environment lacks what the communicator needs, the communicator has
            another rank or size than the environment, or the ranks have different versions of a package.
    """
    communicator = name if isinstance(name, Communicator) else _named(name, environment, device)
    _check_place(communicator, environment)
    if communicator.size > 1 and communicator.name != "tf":  # Its ranks compared versions in their rendezvous.
        _check_versions(communicator)
    return communicator


def _named(name: str, environment: Any, device: str | None) -> Communicator:
    name = wanted_communicator() if name == "auto" else name
    is_auto = name == "auto"
    has_gpu = bool(tf.config.get_visible_devices("GPU"))
    if name not in OWN_COMMUNICATORS:
        if not isinstance(name, str):
            raise unknown_communicator(name, [*communicator_names(), "or a tfrep.Communicator"])
        return _made_by(factory_of(name), name, environment)
    if name not in ("tf", "mpi", "shared_memory"):
        horovod = horovod_transports()
        choice = choose_communicator(
            horovod,
            gpus=has_gpu,
            reachable=_reachable(environment, horovod or ()) if is_auto else ("horovod",),
            size=environment.size if is_auto else 2,
        )
        if choice.hint and environment.rank == 0:
            warn(choice.describe())
        name = choice.communicator
    if name == "horovod":
        from tfrep_strategy.communicators.horovod import HorovodCommunicator

        return HorovodCommunicator(device=device)
    if environment.size == 1:
        return SingleCommunicator()
    if name == "mpi":
        from tfrep_strategy.communicators.mpi import MpiCommunicator

        return MpiCommunicator(environment)
    if name == "shared_memory":
        from tfrep_strategy.communicators.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(environment)
    from tfrep_strategy.communicators.tf_collective import TensorFlowCommunicator

    connected = TensorFlowCommunicator(environment, device)
    if not is_auto:
        return connected
    from tfrep_strategy.communicators.shared_memory import over_shared_memory

    return over_shared_memory(connected, environment, has_gpu=has_gpu)


def _reachable(environment: Any, horovod: Collection[str]) -> Collection[str]:
    """Returns the communicators that can connect the processes of an environment."""
    by_mpi = isinstance(environment, MpiEnvironment)
    if environment.can_tell_addresses:
        return ("tf", "horovod") if by_mpi and "mpi" in horovod else ("tf",)
    return ("mpi",) if by_mpi and "mpi" not in horovod and _mpi_loads() else ("horovod",)


def _mpi_loads() -> bool:
    from tfrep_strategy.communicators.mpi import loaded_mpi

    try:
        loaded_mpi()
    except ConfigurationError as error:
        warn(f'The communicator "mpi" cannot be used. {error}')
        return False
    return True


def _made_by(factory: Callable[[Any], Any], name: str, environment: Any) -> Communicator:
    made = factory(environment)
    if not isinstance(made, Communicator):
        raise ConfigurationError(
            message(
                f"The factory of the communicator {name!r} must return a tfrep.Communicator.",
                hint="register a subclass of tfrep.Communicator, or a function that returns one.",
                returned=made,
            )
        )
    return made


def _check_place(communicator: Communicator, environment: Any) -> None:
    """Refuses a communicator that connects other processes than the environment's: each process would train alone."""
    expected, found = (environment.rank, environment.size), (communicator.rank, communicator.size)
    if environment.size == 1 or expected == found:
        return
    by_address = "set MASTER_ADDR and MASTER_PORT to where rank 0 can listen, so that the ranks connect without MPI; or "
    raise ConfigurationError(
        message(
            f"According to {environment.name} this process is rank {expected[0]} of {expected[1]},"
            f" but its communicator says rank {found[0]} of {found[1]}.",
            hint=f"{by_address if isinstance(environment, MpiEnvironment) else ''}use a launcher that the communicator supports:"
            " Horovod supports horovodrun and `tfrep run`. It supports mpirun and srun only if it was built with MPI"
            ' (`tfrep horovod install --with mpi`). The communicator "mpi" needs mpirun, or srun --mpi. To run this process'
            f" alone, unset {', '.join(environment.found) or 'the variables of the environment'}.",
            communicator=communicator.name,
            environment=environment.describe(),
        )
    )


def _check_versions(communicator: Communicator) -> None:
    """Refuses ranks that have different versions of this package, of TensorFlow or of Keras. All ranks must call it."""
    all_versions = communicator.all_gather_object(versions())
    for rank, own in enumerate(all_versions):
        if name := differing(all_versions[0], own):
            raise ConfigurationError(
                message(
                    f"Rank {rank} has {name} {own.get(name)}, and rank 0 has {all_versions[0][name]}.",
                    hint="install the same versions everywhere.",
                    code="TFREP-E003",
                    communicator=communicator.name,
                )
            )
