"""What processes can talk through on this machine, and which of it "auto" means. Nothing here loads TensorFlow."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pynvml

HOROVOD_TRANSPORTS = {"gloo": "14GlooController", "mpi": "13MPIController", "nccl": "13NCCLAllreduce"}
"""What Horovod can have built in, and the class of its library that shows it."""

_SYSTEM_HOMES = ("/usr/local/cuda", "/usr/local", "/usr")
_LIBRARY_FOLDERS = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_NCCL_VERSION = re.compile(rb"NCCL version (\d[\d.]*)\+cuda(\d+\.\d+)")


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
    with _mapped(library) as content:
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


def gpus_are_visible() -> bool:
    """Asks NVIDIA's driver whether there are GPUs, and the environment whether programs may see them.

    Returns:
        Whether there are; False where there is no driver.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if not chosen or chosen.startswith("-"):
        return False
    return bool(_ask_driver(pynvml.nvmlDeviceGetCount))


def driver_cuda() -> str | None:
    """Asks NVIDIA's driver for the newest CUDA that it runs.

    Returns:
        Such as "12.8"; `None` where there is no driver.
    """
    version = _ask_driver(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


@dataclass(frozen=True)
class Nccl:
    """NCCL's library on this machine.

    Attributes:
        library: Its path.
        version: Its version, such as "2.27.7"; empty if the library does not tell.
        cuda: The CUDA that it was built with, such as "12.9"; empty if the library does not tell.
    """

    library: Path
    version: str = ""
    cuda: str = ""

    @property
    def header(self) -> Path:
        """Where its header is, if it was installed too."""
        homes = (folder for folder in self.library.parents if Path(folder, "include", "nccl.h").exists())
        return Path(next(homes, self.library.parent.parent), "include", "nccl.h")

    def describe(self) -> str:
        """Says it in a line.

        Example:
            >>> Nccl(Path("/usr/lib/libnccl.so.2"), "2.27.7", "12.9").describe()
            '2.27.7 for CUDA 12.9, /usr/lib/libnccl.so.2'
        """
        return f"{self.version or 'version unknown'} for CUDA {self.cuda or 'unknown'}, {self.library}"


def find_nccl() -> Nccl | None:
    """Finds the NCCL that TensorFlow and Horovod load.

    `HOROVOD_NCCL_HOME` comes first, then `LD_LIBRARY_PATH`, then the wheel `nvidia-nccl-cu12`, which `tensorflow[and-cuda]`
    brings, then the system.

    Returns:
        What was found, or `None`.
    """
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    own, others = [os.environ.get("HOROVOD_NCCL_HOME", "")], [*_wheel_homes("nccl"), *_SYSTEM_HOMES]
    folders = [*_library_folders(own), *named, *_library_folders(others)]
    library = next((path for folder in folders if (path := Path(folder, "libnccl.so.2")).exists()), None)
    if library is None:
        return None
    with _mapped(library) as content:
        found = _NCCL_VERSION.search(content)
        return Nccl(library, *(part.decode() for part in found.groups())) if found else Nccl(library)


def nccl_problem(nccl: Nccl | None, driver: str | None) -> str:
    """Says what keeps NCCL from working, and the mend.

    Args:
        nccl: From `find_nccl`.
        driver: The newest CUDA that the driver runs, from `driver_cuda`; `None` if it is not known.

    Returns:
        A sentence and a hint, or nothing.

    Example:
        >>> print(nccl_problem(Nccl(Path("/usr/lib/libnccl.so.2"), "2.27.7", "13.0"), "12.8"))
        NCCL 2.27.7 is for CUDA 13.0, and the driver runs CUDA up to 12.8 (/usr/lib/libnccl.so.2).
        Hint: pip uninstall nvidia-nccl-cu13; pip install --force-reinstall nvidia-nccl-cu12; or install a newer driver.
    """
    if nccl is None:
        return (
            "NCCL is missing: libnccl.so.2 is not in LD_LIBRARY_PATH, in HOROVOD_NCCL_HOME, in a wheel or in the system."
            "\nHint: pip install nvidia-nccl-cu12, or pip install 'tensorflow[and-cuda]'."
        )
    if not newer_major(nccl.cuda, driver):
        return ""
    wheel, own = (f"nvidia-nccl-cu{each.partition('.')[0]}" for each in (nccl.cuda, driver or ""))
    return (
        f"NCCL {nccl.version} is for CUDA {nccl.cuda}, and the driver runs CUDA up to {driver} ({nccl.library})."
        f"\nHint: pip uninstall {wheel}; pip install --force-reinstall {own}; or install a newer driver."
    )


def newer_major(version: str, driver: str | None) -> bool:
    """Whether a CUDA is of a later major version than the driver runs. Minor versions fit to each other.

    Example:
        >>> newer_major("13.0", "12.8"), newer_major("12.9", "12.2"), newer_major("13.0", None)
        (True, False, False)
    """
    return bool(version and driver) and int(version.partition(".")[0]) > int(str(driver).partition(".")[0])


def _ask_driver(question: Callable[[], int]) -> int:
    """Returns the driver's answer; 0 where there is no driver, or none that knows the question."""
    try:
        pynvml.nvmlInit()
        try:
            return question()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0


def _library_folders(homes: Sequence[str]) -> list[str]:
    return [os.path.join(home, folder) for home in homes if home for folder in _LIBRARY_FOLDERS]


def _wheel_homes(part: str) -> list[str]:
    """Folders of NVIDIA's wheels, which share the package `nvidia`."""
    found = importlib.util.find_spec("nvidia")
    return [os.path.join(folder, part) for folder in found.submodule_search_locations or ()] if found else []


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
