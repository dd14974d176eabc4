"""The hardware of this machine: cores and their distribution to ranks, NVIDIA GPUs, memory that processes share."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import mmap
import os
import re
import resource
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pynvml

from tfrep_strategy.errors import ConfigurationError, message

_ROOT = Path("/sys/fs/cgroup")


def bound_cores() -> int:
    """Returns the number of cores that this process may run on.

    Example:
        >>> 1 <= bound_cores() <= os.cpu_count()
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Returns the number of cores that this process may keep busy: those that it may run on, or fewer by its container's quota.

    Example:
        >>> 1 <= usable_cores() <= bound_cores()
        True
    """
    return max(1, math.ceil(min([bound_cores(), *_quotas()])))


def cores_of_container() -> int:
    """Returns the number of cores that all processes of this container may keep busy, whatever this one is bound to.

    Example:
        >>> usable_cores() <= cores_of_container()
        True
    """
    return max(1, math.ceil(min([os.cpu_count() or 1, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yields the quotas of this process's control group, and of its parents, in cores (Linux: `man 7 cgroups`)."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _ROOT / controllers
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
            if controllers:  # Version 1.
                quota, period = (_read(folder / f"cpu.cfs_{kind}_us").strip() for kind in ("quota", "period"))
            if quota.isdecimal() and period.isdecimal():
                yield int(quota) / int(period)
            if folder == root:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"
"""The variable with TensorFlow's number of threads for an operation, which it reads when it starts its devices."""

_CORES = Path("/sys/devices/system/cpu")


def threads_of_rank(ranks: int) -> int:
    """Returns the number of threads for an operation of one of several ranks, so that all together use each core once.

    Cores beyond a container's quota do not count.

    Args:
        ranks: Number of ranks that share the cores of this process.

    Example:
        >>> threads_of_rank(10_000)
        1
    """
    return max(1, usable_cores() // ranks)


def thread_variables(ranks: int) -> dict[str, str]:
    """Returns variables that make the ranks that this process starts share its cores; none if the user has set them.

    Args:
        ranks: Number of ranks on this machine.

    Example:
        >>> thread_variables(1)
        {}
    """
    return {} if ranks == 1 or THREADS_VARIABLE in os.environ else {THREADS_VARIABLE: str(threads_of_rank(ranks))}


def is_bound() -> bool:
    """Returns whether this process may not use some cores: its launcher may have given them to other ranks."""
    return bound_cores() < (os.cpu_count() or 1)


def cores_of_ranks(ranks: int) -> list[frozenset[int]]:
    """Divides the cores of this process into equal parts, one for each rank.

    Hardware threads of one core stay together, and so do the cores of one socket. The kernel may number the first threads of all
    cores before the second ones, and ranks that share a core slow each other down.

    Args:
        ranks: Number of ranks that share the cores of this process.

    Returns:
        The numbers of each rank's cores. Remaining cores belong to no rank.

    Raises:
        ConfigurationError: There are fewer cores than ranks, or this system cannot bind processes.

    Example:
        >>> len(cores_of_ranks(1))
        1
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(message("This system does not bind processes to cores.", hint="leave --bind-cores out."))
    cores = sorted(os.sched_getaffinity(0), key=_place)
    each = len(cores) // ranks
    if not each:
        hint = "use fewer ranks on this machine, or leave --bind-cores out."
        raise ConfigurationError(message("There is no core for each rank.", hint=hint, ranks=ranks, cores=len(cores)))
    return [frozenset(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _place(core: int) -> tuple[int, int, int]:
    """Returns the socket and the core of a hardware thread, and its own number (Linux: `admin-guide/cputopology`)."""
    folder = _CORES / f"cpu{core}" / "topology"
    try:
        socket, physical = (int((folder / name).read_text("utf-8")) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # Some virtual machines do not report them.
        return 0, core, core
    return socket, physical, core


@contextlib.contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Binds this thread while the body runs. Processes that it starts meanwhile stay bound, with all their threads.

    Args:
        cores: The numbers of cores; empty for no binding.

    Example:
        >>> with bound_to(()):
        ...     bound_cores() >= 1
        True
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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
    return visible_gpus() > 0


def visible_gpus() -> int:
    """Asks NVIDIA's driver how many GPUs there are, and the environment how many of them programs may see.

    Returns:
        The number of visible GPUs, parts that MIG has cut among them if they are named; 0 if there is no driver.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if not chosen or chosen.startswith("-"):
        return 0
    found = _ask_driver(pynvml.nvmlDeviceGetCount, 0)
    if chosen == "all" or not found:
        return found
    # As CUDA does: what follows a number that is none of a GPU is not seen.
    names = (each.strip() for each in chosen.split(","))
    return len(list(itertools.takewhile(lambda name: not name.lstrip("-").isdecimal() or 0 <= int(name) < found, names)))


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
        version: Its version, such as "2.27.7"; empty if unknown.
        cuda: The CUDA version that it was built with, such as "12.9"; empty if unknown.
    """

    library: Path
    version: str = ""
    cuda: str = ""

    @property
    def header(self) -> Path:
        """The path of its header, if it was installed."""
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
        driver: The newest CUDA that the driver runs, from `driver_cuda`; None if unknown.

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


CHUNK_BYTES = 1 << 20
"""The bytes of a member that are in memory at once. Smaller chunks cost more waits, larger ones exceed a core's cache."""

MOST_IN_MESSAGE = 1 << 13
"""The largest data of a member that travels with the message that begins a collective, without the memory."""

SHARES_MEMORY = hasattr(os, "memfd_create")
"""Whether processes of this machine can share memory without a name, as on Linux."""

MOST_SHARING = 16
"""The largest number of ranks that was measured. Each rank talks to each, so another transport may be faster for more."""


def bytes_for(size: int) -> int:
    """Returns the size of the memory of a group.

    Args:
        size: Number of members.

    Example:
        >>> bytes_for(2) >> 20
        6
    """
    return 2 * (size + 1) * CHUNK_BYTES


def new_memory(size: int) -> int:
    """Makes memory without a name. It costs nothing until it is used.

    Args:
        size: The size in bytes.

    Returns:
        A descriptor.

    Raises:
        OSError: The system, or a limit of this process, does not allow it.

    Example:
        >>> os.close(new_memory(4096))
    """
    descriptor = os.memfd_create("tfrep")
    try:
        with _files_of_any_size():
            os.ftruncate(descriptor, size)
        mmap.mmap(descriptor, 0).close()  # Otherwise a rank would fail later.
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _files_of_any_size() -> Iterator[None]:
    """Raises the limit of file sizes as far as this process may, because memory without a name is a file to the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def problem_of_sharing(size: int) -> str | None:
    """Tries every operation that ranks need for shared memory.

    Args:
        size: Number of ranks.

    Returns:
        The problem; None if there is none.

    Example:
        >>> problem_of_sharing(2) is None or not SHARES_MEMORY
        True
    """
    if not SHARES_MEMORY:
        return "the system is not Linux"
    try:
        with contextlib.ExitStack() as stack:
            memory = new_memory(bytes_for(size))
            stack.callback(os.close, memory)
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            server.bind("")  # Binds to a free name in the kernel.
            for _ in range(size):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in ends:
                    stack.enter_context(end)
            socket.send_fds(ends[0], [b"memory"], [memory])
            _, files, _, _ = socket.recv_fds(ends[1], 10, 1)
            for file in files:
                os.close(file)
            return None if files else "the system passes no descriptors"
    except OSError as error:
        return f"the system refuses it ({error.strerror or error})"
