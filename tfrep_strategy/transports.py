"""What processes can talk through on this machine, and which of it "auto" means. Nothing here loads TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tfrep_strategy.nvidia import mapped

HOROVOD_TRANSPORTS = {"gloo": "14GlooController", "mpi": "13MPIController", "nccl": "13NCCLAllreduce"}
"""What Horovod can have built in, and the class of its library that shows it."""


@dataclass(frozen=True)
class Choice:
    """A communicator, and why it is taken.

    Attributes:
        communicator: "horovod" or "tf".
        reason: Why, as a sentence.
        hint: How to get a faster one; empty if there is nothing to mend.
    """

    communicator: str
    reason: str
    hint: str = ""

    def describe(self) -> str:
        """Says it in a line or two.

        Example:
            >>> Choice("tf", "Horovod is not installed.").describe()
            'Communicator "tf": Horovod is not installed.'
        """
        return f'Communicator "{self.communicator}": {self.reason}' + (f"\nHint: {self.hint}" if self.hint else "")


def choose_communicator(
    horovod: Collection[str] | None, *, gpus: bool, reachable: Collection[str] = ("horovod", "tf")
) -> Choice:
    """Decides what "auto" means. `tfrep run`, the strategies and `tfrep doctor` all ask here.

    On GPUs Horovod is taken only if it has NCCL, since it would otherwise carry every gradient through the CPU.

    Args:
        horovod: What Horovod has built in, from `horovod_transports`; `None` if it is not installed.
        gpus: Whether the replicas are on GPUs.
        reachable: The communicators by which the processes can find each other. A launcher can serve both. In a process
            that knows the address of every other it is "tf", in one that was started for Horovod it is "horovod".

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
            return Choice("horovod", f"{reason}. It has no NCCL, and carries everything through the CPU.", hint)
        return Choice("horovod", f"{reason}.")
    if horovod is None:
        return Choice("tf", "Horovod is not installed.")
    if slow:
        return Choice("tf", "there are GPUs, and the Horovod that is installed has no NCCL.", f"{install}.")
    return Choice("horovod", "Horovod has NCCL for the GPUs." if gpus else "Horovod is installed.")


def horovod_transports() -> tuple[str, ...] | None:
    """Reads what is built in from the library of the installed Horovod, without loading it.

    Returns:
        Some of "gloo", "mpi" and "nccl"; `None` if Horovod is not installed with its TensorFlow operations.

    Example:
        >>> horovod_transports()
        ('gloo',)
    """
    library = horovod_library()
    if library is None:
        return None
    with mapped(library) as content:
        # The name of a class is there for as long as the class is, in a library without symbols too.
        return tuple(name for name, kind in HOROVOD_TRANSPORTS.items() if content.find(f"{kind}E".encode()) >= 0)


def horovod_library() -> Path | None:
    """Finds the library of the installed Horovod, without importing it.

    Returns:
        Its path; `None` if Horovod is not installed with its TensorFlow operations.
    """
    found = importlib.util.find_spec("horovod")
    folders = found.submodule_search_locations or () if found else ()
    return next((path for folder in folders for path in Path(folder, "tensorflow").glob("mpi_lib*")), None)
