"""Builds Horovod for the installed TensorFlow. Horovod's last release does not build with it unchanged."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir

from tfrep_strategy.cluster.hardware import driver_cuda, find_nccl, nccl_problem, newer_major, usable_cores
from tfrep_strategy.cluster.horovod.source import ADDED, CHANGES, MARK, change_source
from tfrep_strategy.core.validation import made_folder
from tfrep_strategy.errors import ConfigurationError, TfrepError, message

HOROVOD_VERSION = "0.28.1"
"""The release to build."""

EXTRAS = ("mpi", "nccl")
"""The transports that can be built in besides Gloo."""

PROBE_SECONDS = 120.0
"""The time limit for importing Horovod."""

_PYTHON_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
_ERROR = re.compile(r"\berror: |^\s*CMake Error|undefined reference to|\bnvcc fatal", re.IGNORECASE)

# Possible folders of a CUDA toolkit. Horovod's own variable comes first, the folder of the nvcc on PATH last.
_CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_CUDA_HOMES = ("/usr/local/cuda",)
_CUDA_RELEASE = re.compile(r"release (\d+\.\d+)")
_CUDA_ARCHITECTURES = "HOROVOD_BUILD_CUDA_CC_LIST"

_PROBE = """
import json
import horovod.tensorflow as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}))
"""


@dataclass(frozen=True)
class HorovodStatus:
    """The state of the installed Horovod.

    Attributes:
        version: Its version; None if it is not installed.
        built_in: The transports that it was built with.
        problem: The reason why it cannot be used; empty if it can.
    """

    version: str | None
    built_in: tuple[str, ...] = ()
    problem: str = ""

    def describe(self) -> str:
        """Describes the state in one or two lines.

        Returns:
            The text.

        Example:
            >>> HorovodStatus("0.28.1+tfrep", ("gloo",)).describe()
            'Horovod 0.28.1+tfrep, built with gloo'
        """
        if self.version is None:
            return f"Horovod: {self.problem}"
        if self.problem:
            return f"Horovod {self.version} does not work: {self.problem}"
        described = f"Horovod {self.version}, built with {', '.join(self.built_in)}"
        if not self.version.endswith(MARK):
            described += "\nIts ranks do not authenticate peers while they start; `tfrep horovod install` builds one that does."
        return described


def status() -> HorovodStatus:
    """Checks the installed Horovod.

    A Horovod that was built for another TensorFlow may crash on import, so it is imported in another process.

    Returns:
        The status.

    Example:
        >>> status().describe()
        'Horovod...'
    """
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return HorovodStatus(None, problem="not installed; run `tfrep horovod install`.")
    command = [sys.executable, "-c", _PROBE]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or [f"importing it ended with exit code {probe.returncode}"]
        mend = nccl_problem(find_nccl(), driver_cuda()) if "libnccl" in lines[-1] else ""
        return HorovodStatus(version, problem=mend or f"{lines[-1]}\nHint: run `tfrep horovod install`.")
    built = json.loads(probe.stdout.strip().splitlines()[-1])
    built_in = tuple(name for name, there in built.items() if there)
    return HorovodStatus(version, built_in, nccl_problem(find_nccl(), driver_cuda()) if "nccl" in built_in else "")


def build_wheel(extras: Iterable[str] = (), cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns a wheel of Horovod for the installed TensorFlow and Python, from the cache or newly built.

    Args:
        extras: The transports to build in besides Gloo: "nccl", "mpi".
        cache_dir: The folder of cached wheels. Default: `TFREP_CACHE_DIR`, or the user's cache folder.

    Returns:
        Path of the wheel.

    Raises:
        ConfigurationError: An extra is unknown, the cache cannot be made, or a tool that the build needs is missing.
        TfrepError: The build failed. The message contains the first error and the path of the log.

    Example:
        >>> build_wheel(["infiniband"])
        Traceback (most recent call last):
        tfrep_strategy.errors.ConfigurationError: Unknown transport of Horovod. Received: extra='infiniband'
        Hint: use nccl or mpi.
    """
    chosen = sorted(set(extras))
    for extra in chosen:
        if extra not in EXTRAS:
            raise ConfigurationError(message("Unknown transport of Horovod.", hint="use nccl or mpi.", extra=extra))
    folder = made_folder("cache_dir", cache_folder(cache_dir) / _key(chosen))
    with FileLock(folder / "lock"):
        wheel = next((each for each in folder.glob("*.whl") if each.stem.endswith((f"_{platform.machine()}", "-any"))), None)
        if wheel is None:
            _check_tools(chosen)
            wheel = _build(chosen, folder)
    return wheel


def cache_folder(wanted: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of files that are kept between runs.

    Args:
        wanted: Another folder. Default: `TFREP_CACHE_DIR`, or the user's cache folder.

    Returns:
        Its absolute path. It may not exist yet.

    Example:
        >>> cache_folder("/var/cache/tfrep")
        PosixPath('/var/cache/tfrep')
    """
    return Path(wanted or os.environ.get("TFREP_CACHE_DIR") or user_cache_dir("tfrep-strategy")).absolute()


def install_wheel(wheel: Path) -> None:
    """Installs a wheel of Horovod and the Python packages that it needs. It changes no other package.

    Args:
        wheel: From `build_wheel`.

    Raises:
        TfrepError: pip failed.
    """
    for arguments in (["--no-deps", "--force-reinstall", str(wheel)], _PYTHON_NEEDS):
        done = subprocess.run([*_pip("install"), "--quiet", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            what, hint = f"pip could not install Horovod.\n{done.stderr.strip()}", "see what pip says above."
            raise TfrepError(message(what, hint, wheel=wheel.name))


def _key(extras: Sequence[str]) -> str:
    import tensorflow as tf

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    built_in = ["gloo", *extras]
    if "mpi" in extras:  # MPI libraries are not compatible with each other.
        mpicxx = _which("mpicxx")  # `_check_tools` refuses to build without one.
        shown = subprocess.run([mpicxx, "-show"], capture_output=True, check=False).stdout if mpicxx else b""
        built_in += [hashlib.sha256(shown).hexdigest()[:8]]
    if "nccl" in extras:
        cuda, nccl = _find_cuda(), find_nccl()
        built_in += [f"cuda{cuda and cuda.version}", f"nccl{nccl and nccl.version}"]
        built_in += [f"sm{os.environ[_CUDA_ARCHITECTURES]}"] if _CUDA_ARCHITECTURES in os.environ else []
    changes = hashlib.sha256(json.dumps([CHANGES, ADDED]).encode()).hexdigest()[:8]
    return f"horovod-{HOROVOD_VERSION}-tensorflow-{tf.__version__}-{python}-{'-'.join([*built_in, changes])}"


def _check_tools(extras: Sequence[str]) -> None:
    needed = {"cmake": "pip install 'cmake<4'", "g++": "install a C++ compiler", "make": "install make"}
    if "mpi" in extras:
        needed["mpicxx"] = "install an MPI with its compiler wrappers, such as Open MPI"
    missing = {tool: hint for tool, hint in needed.items() if _which(tool) is None}
    for module in ("setuptools", "wheel", "packaging"):
        if importlib.util.find_spec(module) is None:
            missing[module] = f"pip install {module}"
    if "nccl" in extras:
        missing |= _missing_for_nccl()
    if missing:
        raise ConfigurationError(
            message("Tools to build Horovod are missing.", hint="; ".join(missing.values()) + ".", missing=list(missing))
        )


def _missing_for_nccl() -> dict[str, str]:
    """Returns the missing tools of a build with NCCL, and how to install each.

    Raises:
        ConfigurationError: TensorFlow or the driver does not support NCCL.
    """
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        raise ConfigurationError(
            message(
                "This TensorFlow was built without CUDA, so Horovod cannot use NCCL.",
                hint="pip install 'tensorflow[and-cuda]'.",
                tensorflow=tf.__version__,
            )
        )
    cuda, nccl, driver = _find_cuda(), find_nccl(), driver_cuda()
    missing = {}
    if cuda is None:
        missing["nvcc"] = "install NVIDIA's CUDA toolkit and set CUDA_HOME to its folder (tensorflow[and-cuda] brings no nvcc)"
    elif newer_major(cuda.version, driver):
        raise ConfigurationError(
            message(
                f"The CUDA toolkit is newer than the driver, which runs CUDA up to {driver}.",
                hint="set CUDA_HOME to an older toolkit, or install a newer driver.",
                CUDA_HOME=str(cuda.home),
                version=cuda.version,
            )
        )
    if nccl is None or not nccl.header.exists():
        missing["nccl.h"] = "pip install nvidia-nccl-cu12, or set HOROVOD_NCCL_HOME to the folder of include/nccl.h"
    elif problem := nccl_problem(nccl, driver):
        raise ConfigurationError(problem)
    return missing


@dataclass(frozen=True)
class _Cuda:
    """A CUDA toolkit: its folder and its version, such as "12.8"."""

    home: Path
    version: str


def _find_cuda() -> _Cuda | None:
    homes = [os.environ.get(name, "") for name in _CUDA_VARIABLES]
    on_path = _which("nvcc")
    homes += [*_CUDA_HOMES, *([str(Path(on_path).resolve().parent.parent)] if on_path else [])]
    for home in map(Path, filter(None, homes)):
        nvcc = home / "bin" / "nvcc"
        if nvcc.exists() and any(home.glob(f"{folder}include/cuda_runtime.h") for folder in ("", "targets/*/")):
            said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
            if release := _CUDA_RELEASE.search(said):
                return _Cuda(home, release[1])
    return None


def _build(extras: Sequence[str], folder: Path) -> Path:
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(prefix="tfrep-horovod-") as name, open(log, "w", encoding="utf-8") as output:
        work = Path(name)
        print(f"Building Horovod {HOROVOD_VERSION}, about 5 minutes on two cores. Log: {log}", file=sys.stderr)
        try:
            command = [*_pip("wheel"), "--no-build-isolation", "--no-deps", "-v", "-w", str(work / "wheels"), _get_source(work)]
            subprocess.run(command, env=_build_environ(extras), stdout=output, stderr=subprocess.STDOUT, check=True)
        except subprocess.CalledProcessError as error:
            output.write(error.stderr or "")
            output.flush()
            lines = log.read_text("utf-8", "replace").splitlines()
            first = next(filter(_ERROR.search, lines), "".join(lines[-1:]))
            raise TfrepError(message(f"Horovod could not be built: {first}", hint=f"the whole log is in {log}")) from None
        built = next((work / "wheels").glob("*.whl"))
        # Renaming is atomic, copying is not, and the temporary folder may be on another disk.
        return Path(shutil.copy(built, folder / "unfinished")).replace(folder / built.name)


def _get_source(work: Path) -> str:
    """Downloads, unpacks and changes Horovod."""
    download = [*_pip("download"), "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(work)]
    subprocess.run([*download, f"horovod=={HOROVOD_VERSION}"], check=True, capture_output=True, text=True)
    shutil.unpack_archive(next(work.glob("horovod-*.tar.gz")), work, filter="data")
    source = work / f"horovod-{HOROVOD_VERSION}"
    change_source(source)
    return str(source)


def _build_environ(extras: Sequence[str]) -> dict[str, str]:
    switches = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if "mpi" in extras else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_CMAKE": str(_which("cmake")),
        # Without it, CMake 4 refuses the old minimum versions in Horovod's third-party projects.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if "nccl" in extras:
        cuda, nccl = _find_cuda(), find_nccl()
        assert cuda is not None
        assert nccl is not None
        switches |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(cuda.home),
            "HOROVOD_NCCL_INCLUDE": str(nccl.header.parent),
            "HOROVOD_NCCL_LIB": str(nccl.library.parent),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return {"MAKEFLAGS": f"-j{usable_cores()}"} | os.environ | switches


def _which(tool: str) -> str | None:
    """Finds a tool on PATH, or beside this Python, where pip installs tools."""
    return shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", command]
