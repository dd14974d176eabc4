"""Finds the transports that are installed on this machine, and chooses the one for "auto". It does not load TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tfrep_strategy.nvidia import mapped

HOROVOD_TRANSPORTS = {"gloo": "14GlooController", "mpi": "13MPIController", "nccl": "13NCCLAllreduce"}
"""The transports that Horovod can contain, and the C++ class in its library that shows each."""


@dataclass(frozen=True)
class Choice:
    """The chosen communicator, and the reason.

    Attributes:
        communicator: "horovod" or "tf".
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
    horovod: Collection[str] | None, *, gpus: bool, reachable: Collection[str] = ("horovod", "tf")
) -> Choice:
    """Chooses the communicator for "auto", for `tfrep run`, the strategies and `tfrep doctor` alike.

    On GPUs it chooses Horovod only with NCCL. Without NCCL, Horovod would send every gradient through the CPU.

    Args:
        horovod: The transports in Horovod, from `horovod_transports`; None if Horovod is not installed.
        gpus: Whether the replicas are on GPUs.
        reachable: The communicators that can connect the processes. A launcher can offer both. If a process knows the
            addresses of all others, it is "tf"; if it was started for Horovod, it is "horovod".

    Returns:
        The choice.

    Example:
        >>> choose_communicator(["gloo"], gpus=True).communicator, choose_communicator(["gloo"], gpus=False).communicator
        ('tf', 'horovod')
    """
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
    if horovod is None:
        return Choice("tf", "Horovod is not installed.")
    if slow:
        return Choice("tf", "there are GPUs, and the installed Horovod has no NCCL.", f"{install}.")
    return Choice("horovod", "Horovod has NCCL for the GPUs." if gpus else "Horovod is installed.")


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
