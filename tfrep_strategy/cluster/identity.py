"""The rank, peers and communicator of the processes that this package starts, passed to them in environment variables."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator, Sequence

from tfrep_strategy.cluster import events, flight_recorder
from tfrep_strategy.cluster.environments import identity_variables
from tfrep_strategy.cluster.hardware import MOST_SHARING, SHARES_MEMORY, gpus_are_visible, problem_of_sharing
from tfrep_strategy.cluster.horovod.gloo import on_this_machine
from tfrep_strategy.cluster.rendezvous.confinement import problem_of_confining
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, held_ports
from tfrep_strategy.cluster.transports import (
    OWN_COMMUNICATORS,
    choose_communicator,
    horovod_library,
    horovod_transports,
    inside_of,
    installed_communicators,
    no_shared_memory,
)
from tfrep_strategy.errors import ConfigurationError, message, warn

RUN_VARIABLES = (
    "TFREP_STRATEGY", "TFREP_COMMUNICATOR", "TFREP_NUM_REPLICAS", "TFREP_BACKUP_DIR", "TFREP_PROGRESS_DIR", "TFREP_PROFILE",
    "TFREP_PROFILE_DIR", events.VARIABLE, flight_recorder.VARIABLE,
)  # fmt: skip
"""Variables in which a run passes on the strategy to make, backups, the profile, and where to report events and hangs."""


def horovod_is_installed() -> bool:
    """Returns whether Horovod is installed with its TensorFlow operations, without importing it.

    Returns:
        Whether it is installed.

    Example:
        >>> communicator = "horovod" if horovod_is_installed() else "tf"
    """
    return horovod_library() is not None


def resolve_communicator(name: str, size: int = 2) -> str:
    """Turns a user's choice into the communicator of a run whose processes are all on this machine.

    Args:
        name: "auto", "horovod", "tf", "mpi", "shared_memory" or the name of an installed transport. For "auto"
            `choose_communicator` decides. A warning names a faster choice, and the reason if shared memory cannot be used.
        size: Number of processes.

    Returns:
        The communicator.

    Raises:
        ConfigurationError: The name is unknown; or it is "horovod", which is not installed; or it is "mpi", which does not
            connect processes that this package starts.

    Example:
        >>> resolve_communicator("tf")
        'tf'
    """
    check_communicator(name)
    if name == "auto":
        gpus, apart = gpus_are_visible(), problem_of_sharing(size)
        choice = choose_communicator(
            horovod_transports(), gpus=gpus, size=size, open_because=problem_of_confining(), apart_because=apart
        )
        if choice.hint:
            warn(choice.describe())
        if apart and SHARES_MEMORY and not gpus and 1 < size <= MOST_SHARING:
            warn(no_shared_memory(apart, choice.communicator))
        return choice.communicator
    if name == "mpi":
        raise ConfigurationError(
            message(
                "MPI connects only processes that it has started.",
                hint="use `mpirun -np 2 tfrep run --communicator mpi train.py`, or another communicator.",
                communicator=name,
            )
        )
    if name == "horovod" and not horovod_is_installed():
        raise ConfigurationError(
            message(
                "Horovod is not installed.",
                hint="run `tfrep horovod install`.",
                code="TFREP-E005",
                communicator=name,
            )
        )
    return name


def check_communicator(name: str) -> None:
    """Refuses a communicator that new processes would not know, since they have not run the program of this one.

    Raises:
        ConfigurationError: Neither this package nor an installed one has a communicator of this name.

    Example:
        >>> check_communicator("auto")
    """
    if name not in OWN_COMMUNICATORS and name not in installed_communicators():
        raise ConfigurationError(
            message(
                "Unknown communicator.",
                hint=f"use {', '.join(installed_communicators())}.{inside_of(name)} A name that only this program registers is not"
                " known to the processes of a run: they can register it and make their own MultiWorkerStrategy.",
                code="TFREP-E005",
                communicator=name,
            )
        )


def inherited_environ() -> dict[str, str]:
    """Copies this process's environment variables, without those of another run.

    Returns:
        The variables.

    Example:
        >>> "TF_CONFIG" in inherited_environ()
        False
    """
    foreign = identity_variables().union(RUN_VARIABLES)
    return {name: value for name, value in os.environ.items() if name not in foreign}


def common_hash_seed(default: str | None = None) -> str:
    """Returns one `PYTHONHASHSEED` for all ranks of a run, so that sets of strings have the same order on all of them.

    Args:
        default: The value if the user has set none. By default a random number, like Python's.

        Returns:
            The user's value if there is one, otherwise the default.

    Example:
        >>> common_hash_seed("7")
        '7'
    """
    own = os.environ.get("PYTHONHASHSEED", "random")
    if own not in ("", "random"):
        return own
    return default or str(random.SystemRandom().randrange(1, 2**32))


@contextlib.contextmanager
def identities(communicator: str, size: int) -> Iterator[list[dict[str, str]]]:
    """Yields the variables that give each of some processes on this machine its rank, and serves Horovod's rendezvous meanwhile.

    Args:
        communicator: "horovod" needs a rendezvous. For any other, `TF_CONFIG` has the addresses of all processes.
        size: Number of processes.

    Yields:
        One dictionary of environment variables per rank.

    Example:
        >>> with identities("tf", 2) as variables:
        ...     sorted(variables[1])
        ['TF_CONFIG']
    """
    if communicator == "horovod":
        with on_this_machine(size) as variables:
            yield variables
    else:
        with held_ports(size) as ports:
            addresses = [f"{LOOPBACK}:{port}" for port in ports]
            yield [tf_config(addresses, rank) for rank in range(size)]


def tf_config(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """Returns the variable `TF_CONFIG` of a rank.

    Args:
        addresses: "host:port" of each rank.
        rank: The rank.

    Example:
        >>> tf_config(["a:1", "b:1"], 1)
        {'TF_CONFIG': '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
    """
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})}
