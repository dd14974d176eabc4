"""Asks NVIDIA's driver and libraries about the GPUs of this machine. It does not load TensorFlow."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pynvml

_SYSTEM_HOMES = ("/usr/local/cuda", "/usr/local", "/usr")
_LIBRARY_FOLDERS = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_NCCL_VERSION = re.compile(rb"NCCL version (\d[\d.]*)\+cuda(\d+\.\d+)")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it, whether or not TensorFlow can use it.

    Attributes:
        index: Its number in the order of PCI addresses, as `nvidia-smi` shows it.
        name: Its model.
        total_bytes: The size of its memory.
        free_bytes: The part of its memory that is free.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int

    def describe(self) -> str:
        """Describes it in one line.

        Example:
            >>> Gpu(0, "NVIDIA H200", 150 << 30, 75 << 30).describe()
            'GPU 0: NVIDIA H200, 75.0 of 150.0 GiB free'
        """
        return f"GPU {self.index}: {self.name}, {self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free"


def driver_gpus() -> list[Gpu]:
    """Asks the driver for the GPUs of this machine.

    Returns:
        The GPUs; none if there is no driver.
    """
    return _ask_driver(lambda: [_described(index) for index in range(pynvml.nvmlDeviceGetCount())], [])


def _described(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(index, pynvml.nvmlDeviceGetName(handle), memory.total, memory.free)


def gpus_are_visible() -> bool:
    """Asks NVIDIA's driver whether there are GPUs, and the environment whether programs may see them.

    Returns:
        Whether there are visible GPUs; False if there is no driver.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if not chosen or chosen.startswith("-"):
        return False
    return _ask_driver(pynvml.nvmlDeviceGetCount, 0) > 0


def driver_cuda() -> str | None:
    """Asks NVIDIA's driver for the newest CUDA that it runs.

    Returns:
        The version, such as "12.8"; None if there is no driver.
    """
    version = _ask_driver(pynvml.nvmlSystemGetCudaDriverVersion_v2, 0)
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


@dataclass(frozen=True)
class Nccl:
    """NCCL's library on this machine.

    Attributes:
        library: Its path.
        version: Its version, such as "2.27.7"; empty if it is not known.
        cuda: The CUDA version that it was built with, such as "12.9"; empty if it is not known.
    """

    library: Path
    version: str = ""
    cuda: str = ""

    @property
    def header(self) -> Path:
        """Path of its header, if that was installed too."""
        homes = (folder for folder in self.library.parents if Path(folder, "include", "nccl.h").exists())
        return Path(next(homes, self.library.parent.parent), "include", "nccl.h")

    def describe(self) -> str:
        """Describes it in one line.

        Example:
            >>> Nccl(Path("/usr/lib/libnccl.so.2"), "2.27.7", "12.9").describe()
            '2.27.7 for CUDA 12.9, /usr/lib/libnccl.so.2'
        """
        return f"{self.version or 'version unknown'} for CUDA {self.cuda or 'unknown'}, {self.library}"


def find_nccl() -> Nccl | None:
    """Finds the NCCL that TensorFlow and Horovod load.

    `HOROVOD_NCCL_HOME` comes first, then `LD_LIBRARY_PATH`, then the wheel `nvidia-nccl-cu12`, which `tensorflow[and-cuda]`
    installs, then the system.

    Returns:
        The library; None if there is none.
    """
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    own, others = [os.environ.get("HOROVOD_NCCL_HOME", "")], [*_wheel_homes("nccl"), *_SYSTEM_HOMES]
    folders = [*_library_folders(own), *named, *_library_folders(others)]
    library = next((path for folder in folders if (path := Path(folder, "libnccl.so.2")).exists()), None)
    if library is None:
        return None
    with mapped(library) as content:
        found = _NCCL_VERSION.search(content)
        return Nccl(library, *(part.decode() for part in found.groups())) if found else Nccl(library)


def nccl_problem(nccl: Nccl | None, driver: str | None) -> str:
    """Describes why NCCL cannot work, and how to fix it.

    Args:
        nccl: The library, from `find_nccl`.
        driver: The newest CUDA that the driver runs, from `driver_cuda`; None if it is not known.

    Returns:
        A sentence and a hint; an empty string if nothing is wrong.

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
    """Returns whether a CUDA has a newer major version than the driver runs. Minor versions are compatible.

    Example:
        >>> newer_major("13.0", "12.8"), newer_major("12.9", "12.2"), newer_major("13.0", None)
        (True, False, False)
    """
    return bool(version and driver) and int(version.partition(".")[0]) > int(str(driver).partition(".")[0])


def _ask_driver(question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Returns the driver's answer. Returns `otherwise` if there is no driver or it does not support the question."""
    try:
        pynvml.nvmlInit()
        try:
            return question()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return otherwise


def _library_folders(homes: Sequence[str]) -> list[str]:
    return [os.path.join(home, folder) for home in homes if home for folder in _LIBRARY_FOLDERS]


def _wheel_homes(part: str) -> list[str]:
    """Returns the folders of a part of NVIDIA's wheels, which share the package `nvidia`."""
    found = importlib.util.find_spec("nvidia")
    return [os.path.join(folder, part) for folder in found.submodule_search_locations or ()] if found else []


def mapped(path: Path) -> mmap.mmap:
    """Maps a library into memory, to search it without loading it."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
