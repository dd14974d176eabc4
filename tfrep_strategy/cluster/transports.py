"""Names the transports, finds the installed ones, and chooses one for "auto". It does not load TensorFlow."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.hardware import MOST_SHARING, mapped
from tfrep_strategy.errors import ConfigurationError, message

OWN_COMMUNICATORS = ("auto", "horovod", "tf", "mpi", "shared_memory")
"""The names of this package's communicators."""

ENTRY_POINTS = "tfrep_strategy.communicators"
"""The group of entry points in which an installed package names its communicators."""

_registered: dict[str, Callable[[Any], Any]] = {}

HOROVOD_TRANSPORTS = {"gloo": "14GlooController", "mpi": "13MPIController", "nccl": "13NCCLAllreduce"}
"""The transports that Horovod can contain, and the C++ class in its library that shows each."""


def register_communicator(name: str, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Gives a transport a name, for `MultiWorkerStrategy(communicator=name)` and `TFREP_COMMUNICATOR`.

    A process knows only the names that its own program has registered. An installed package can name a transport for all
    processes, and for `tfrep run --communicator`, with an entry point: `mine = "package.module:Mine"` in the group
    `tfrep_strategy.communicators`.

    Args:
        name: The name.
        factory: A subclass of `tfrep.Communicator`, or a function that returns one. It is called with the `Environment` of
            this process (`rank`, `size`, `addresses`, ...) when a strategy is made.

    Returns:
        The factory.

    Raises:
        ConfigurationError: The name is taken or is not text, or the factory cannot be called.

    Example:
        >>> class Alone(tfrep.communicators.SingleCommunicator):
        ...     def __init__(self, environment):
        ...         self.name = "alone"
        >>> _ = tfrep.register_communicator("alone", Alone)
        >>> tfrep.MultiWorkerStrategy("alone").communicator.name
        'alone'
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(message("The name of a communicator must be text.", hint="use a short word.", name=name))
    if not callable(factory):
        raise ConfigurationError(
            message(
                "The factory of a communicator must be a class or a function that takes an Environment.",
                hint="pass the class. An object needs no name: MultiWorkerStrategy(communicator=it).",
                factory=factory,
            )
        )
    if name in communicator_names() and _registered.get(name) is not factory:
        taken = ", ".join(communicator_names())
        raise ConfigurationError(
            message("There is a communicator of this name.", hint=f"use another name than {taken}.", name=name)
        )
    _registered[name] = factory
    return factory


def installed_communicators() -> list[str]:
    """Returns the names that every process on this machine knows, from this package and from installed ones."""
    return [*OWN_COMMUNICATORS, *sorted(_installed())]


def communicator_names() -> list[str]:
    """Returns the names that this process knows.

    Example:
        >>> communicator_names()[:4]
        ['auto', 'horovod', 'tf', 'mpi']
    """
    return [*installed_communicators(), *_registered]


def factory_of(name: str) -> Callable[[Any], Any]:
    """Returns the factory of a communicator that is not this package's.

    Raises:
        ConfigurationError: There is no communicator of this name.
    """
    if name in _registered:
        return _registered[name]
    installed = _installed()
    if name not in installed:
        raise unknown_communicator(name, communicator_names())
    return installed[name].load()


def wanted_communicator() -> str:
    """Returns the communicator that `TFREP_COMMUNICATOR` names; "auto" by default.

    Raises:
        ConfigurationError: This process knows no such name.

    Example:
        >>> wanted_communicator()
        'auto'
    """
    name = os.environ.get("TFREP_COMMUNICATOR") or "auto"
    if name not in OWN_COMMUNICATORS and name not in (known := communicator_names()):
        raise unknown_communicator(name, known, setting="TFREP_COMMUNICATOR")
    return name


def unknown_communicator(name: Any, known: Collection[str], setting: str = "communicator") -> ConfigurationError:
    """Returns the error for an unknown name, of an argument or an environment variable."""
    return ConfigurationError(
        message(
            "Unknown communicator.",
            hint=f"use {', '.join(known)}; tfrep.register_communicator adds a name to this process.{inside_of(name)}",
            code="TFREP-E005",
            **{setting: name},
        )
    )


def inside_of(name: Any) -> str:
    """Tells which communicators use a library that is no communicator itself.

    Args:
        name: What a user has given as a communicator.

    Returns:
        A sentence for a hint, with a space before it; empty if there is nothing to say.

    Example:
        >>> inside_of("gloo"), inside_of("smoke")
        (' "horovod" uses Gloo.', '')
    """
    told = {"nccl": ' On GPUs "tf" uses NCCL, and so does "horovod" if it is built in.', "gloo": ' "horovod" uses Gloo.'}
    return told.get(str(name).lower(), "")


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in OWN_COMMUNICATORS}


@dataclass(frozen=True)
class Choice:
    """The chosen communicator, and the reason.

    Attributes:
        communicator: "shared_memory", "horovod", "tf" or "mpi".
        reason: The reason, as a sentence.
        hint: How to get a faster communicator; empty if there is none.
    """

    communicator: str
    reason: str
    hint: str = ""

    def describe(self) -> str:
        """Describes it in one line or two.

        Example:
            >>> Choice("tf", "Horovod is not installed.").describe()
            'Communicator "tf": Horovod is not installed.'
        """
        return f'Communicator "{self.communicator}": {self.reason}' + (f"\nHint: {self.hint}" if self.hint else "")


def choose_communicator(
    horovod: Collection[str] | None,
    *,
    gpus: bool,
    reachable: Collection[str] = ("horovod", "tf"),
    size: int = 2,
    open_because: str | None = None,
    apart_because: str | None = "they may be on several machines",
) -> Choice:
    """Chooses the communicator for "auto", for `tfrep run`, the strategies and `tfrep doctor` alike.

    On CPUs of one machine it chooses shared memory, which is the fastest for up to `MOST_SHARING` processes. On GPUs it chooses
    Horovod only with NCCL. Without NCCL, Horovod would send every gradient through the CPU.

    Args:
        horovod: The transports in Horovod, from `horovod_transports`; None if Horovod is not installed.
        gpus: Whether the replicas are on GPUs.
        reachable: The communicators that can connect the processes. A launcher can offer both. If a process knows the
            addresses of all others, it is "tf"; if it was started for Horovod, it is "horovod". It is "mpi" if `mpirun` gives
            no addresses, Horovod has no MPI, and mpi4py loads.
        size: Number of processes.
        open_because: Why every program could connect to TensorFlow's servers on this machine; None if it can confine them.
        apart_because: Why the processes cannot use shared memory; None if they can.

    Returns:
        The choice.

    Example:
        >>> choose_communicator(["gloo"], gpus=True).communicator, choose_communicator(["gloo"], gpus=False).communicator
        ('tf', 'horovod')
    """
    if size == 1:
        return Choice("tf", "a single process has no peers.")
    if apart_because is None and not gpus and size <= MOST_SHARING:
        return Choice("shared_memory", "all processes are on this machine, and have no GPU.")
    if "mpi" in reachable:
        return Choice("mpi", "the processes were started by MPI, know no addresses, and mpi4py loads.")
    slow = horovod is not None and gpus and "nccl" not in horovod
    install = "`tfrep horovod install --with nccl` builds NCCL in"
    if "horovod" not in reachable:
        return Choice("tf", "the processes know each other's addresses.")
    if "tf" not in reachable:
        reason = "the processes were started for Horovod, and know no addresses"
        if slow:
            hint = f"{install}, and `tfrep run --communicator tf` uses TensorFlow's."
            return Choice("horovod", f"{reason}. It has no NCCL, and sends everything through the CPU.", hint)
        return Choice("horovod", f"{reason}.")
    if open_because:
        if horovod is not None:
            return Choice("horovod", f"everybody could connect to TensorFlow's servers here ({open_because}).")
        hint = "`tfrep horovod install` installs Horovod, which uses the loopback interface only. See docs/security.md."
        return Choice("tf", f"Horovod is not installed. Any program that reaches its ports has your rights ({open_because}).", hint)
    if horovod is None:
        return Choice("tf", "Horovod is not installed.")
    if slow:
        return Choice("tf", "there are GPUs, and the installed Horovod has no NCCL.", f"{install}.")
    return Choice("horovod", "Horovod has NCCL for the GPUs." if gpus else "Horovod is installed.")


def no_shared_memory(problem: str, communicator: str) -> str:
    """Returns the warning for processes of one machine that cannot use shared memory.

    Example:
        >>> no_shared_memory("the system refuses it", "tf")
        'Communicator "tf": shared memory would be faster, but cannot be used: the system refuses it.'
    """
    return f'Communicator "{communicator}": shared memory would be faster, but cannot be used: {problem}.'


def horovod_transports() -> tuple[str, ...] | None:
    """Reads the transports from the library of the installed Horovod, without loading it.

    Returns:
        Some of "gloo", "mpi" and "nccl"; None if Horovod is not installed with its TensorFlow operations.

    Example:
        >>> set(horovod_transports() or ()) <= {"gloo", "mpi", "nccl"}
        True
    """
    library = horovod_library()
    if library is None:
        return None
    with mapped(library) as content:
        # A library contains the names of its C++ classes, even if its symbols were removed.
        return tuple(name for name, kind in HOROVOD_TRANSPORTS.items() if content.find(f"{kind}E".encode()) >= 0)


def horovod_library() -> Path | None:
    """Finds the library of the installed Horovod, without importing it.

    Returns:
        Its path; None if Horovod is not installed with its TensorFlow operations.
    """
    found = importlib.util.find_spec("horovod")
    folders = found.submodule_search_locations or () if found else ()
    return next((path for folder in folders for path in Path(folder, "tensorflow").glob("mpi_lib*")), None)
