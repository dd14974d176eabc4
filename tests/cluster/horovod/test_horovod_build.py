"""Horovod's wheel: built once, kept under the right name, refused with a reason. Small stand-ins replace its source."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import tensorflow as tf
from raising import refuses

from tfrep_strategy.cluster import hardware
from tfrep_strategy.cluster.horovod import build
from tfrep_strategy.cluster.horovod.build import HorovodStatus, build_wheel, install_wheel, status
from tfrep_strategy.cluster.horovod.source import ADDED, CHANGES
from tfrep_strategy.errors import ConfigurationError, TfrepError

pytestmark = pytest.mark.lane("gpus")

CPYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"

SETUP = """
import os
from setuptools import setup
with open({builds!r}, "a") as builds:
    builds.write(os.environ["HOROVOD_WITH_GLOO"] + os.environ.get("HOROVOD_WITH_MPI", "-") + "\\n")
print("[ 42%] Building CXX object a.o")
{more}
setup(name="horovod", version="0.28.1", py_modules=[])
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny package in place of Horovod; returns the file to which every run of its setup adds a line."""
    builds = tmp_path / "builds"
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "setup.py").write_text(SETUP.format(builds=str(builds), more=""))
    monkeypatch.setattr(build, "_get_source", lambda work: shutil.copytree(folder, work / "source"))
    monkeypatch.delenv("TFREP_CACHE_DIR", raising=False)
    return builds


def test_a_wheel_is_built_once_and_kept_by_version(source, tmp_path):
    wheel = build_wheel(cache_dir=tmp_path / "cache")
    assert zipfile.is_zipfile(wheel)
    runs = source.read_text()
    assert set(runs.split()) == {"1-"}
    assert build_wheel(cache_dir=tmp_path / "cache") == wheel
    assert source.read_text() == runs
    for part in ("0.28.1", f"tensorflow-{tf.__version__}", CPYTHON, "gloo"):
        assert part in wheel.parent.name
    assert "[ 42%]" in (wheel.parent / "build.log").read_text()
    assert sorted(path.name for path in wheel.parent.iterdir() if path.suffix != ".whl" and path.name != "lock") == ["build.log"]


def test_other_flags_and_another_tensorflow_make_another_wheel(source, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_check_tools", lambda extras: None)
    plain = build_wheel(cache_dir=tmp_path)
    with_mpi = build_wheel(["mpi"], tmp_path)
    monkeypatch.setattr(tf, "__version__", "9.9.9")
    newer = build_wheel(cache_dir=tmp_path)
    assert len({plain, with_mpi, newer}) == 3
    assert "11" in source.read_text().split()


def test_the_cache_can_be_named_by_a_variable(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TFREP_CACHE_DIR", str(tmp_path / "named"))
    assert build_wheel().is_relative_to(tmp_path / "named")


def test_other_changes_of_the_source_make_another_wheel(source, tmp_path, monkeypatch):
    before = build_wheel(cache_dir=tmp_path)
    (name,) = ADDED
    monkeypatch.setitem(ADDED, name, "other")
    added = build_wheel(cache_dir=tmp_path)
    monkeypatch.setitem(CHANGES, "setup.py", {"old": "new"})
    assert len({before, added, build_wheel(cache_dir=tmp_path)}) == 3


def test_a_wheel_of_another_processor_is_not_taken(source, tmp_path):
    wheel = build_wheel(cache_dir=tmp_path)
    other = wheel.rename(wheel.with_name("horovod-0.28.1-cp310-cp310-linux_other.whl"))
    assert build_wheel(cache_dir=tmp_path) == wheel
    assert other.exists()


def test_each_mpi_has_a_wheel(source, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_check_tools", lambda extras: None)
    found = set()
    for name in ("openmpi", "mpich", "openmpi"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "mpicxx").write_text(f"#!/bin/sh\necho g++ -I/opt/{name}/include\n")
        (folder / "mpicxx").chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setenv("PATH", f"{folder}:{os.environ['PATH']}")
            found.add(build_wheel(["mpi"], tmp_path).parent)
    assert len(found) == 2


def test_two_at_once_build_once(source, tmp_path):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build_wheel(cache_dir=tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    runs_of_two = source.read_text()
    assert len(found) == 2
    assert found[0] == found[1]
    shutil.rmtree(found[0].parent)
    source.unlink()
    build_wheel(cache_dir=tmp_path)
    assert source.read_text() == runs_of_two


def test_a_failed_build_names_the_first_error_and_the_log(source, tmp_path):
    text = "mpi_ops.cc:7:10: fatal error: gone.h: No such file"
    more = f"print({text!r}, flush=True)\nprint('make: *** Error 1', flush=True)\nraise SystemExit(1)"
    (tmp_path / "source" / "setup.py").write_text(SETUP.format(builds=str(source), more=more))
    with pytest.raises(TfrepError) as caught:
        build_wheel(cache_dir=tmp_path / "cache")
    assert text in str(caught.value)
    log = Path(str(caught.value).rpartition("the whole log is in ")[2])
    assert "make: *** Error 1" in log.read_text()
    assert not list(log.parent.glob("*.whl"))


def test_no_source_is_an_error_with_a_log(tmp_path, monkeypatch):
    def fail(work: Path) -> str:
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: No matching distribution found\n")

    monkeypatch.setattr(build, "_get_source", fail)
    with refuses(TfrepError, told=["No matching distribution"]):
        build_wheel(cache_dir=tmp_path)


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of Horovod that are changed, as a release that is "downloaded": each has the old texts, and a last line."""
    folder = tmp_path / "made" / "horovod-0.28.1"
    for name, changes in CHANGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join([*changes, "last\n"]))

    def download(command: list[str], **options: object) -> None:
        assert "horovod==0.28.1" in command
        shutil.make_archive(str(tmp_path / "work" / "horovod-0.28.1"), "gztar", tmp_path / "made")

    (tmp_path / "work").mkdir()
    monkeypatch.setattr(subprocess, "run", download)
    return folder


@pytest.mark.lane("quick")
def test_the_source_is_changed(released, tmp_path):
    source = Path(build._get_source(tmp_path / "work"))
    texts = {name: (source / name).read_text() for name in CHANGES}
    assert all(text.endswith("last\n") for text in texts.values())
    assert "xla_mpi_ops" not in texts["horovod/tensorflow/CMakeLists.txt"]
    assert "distutils" not in texts["horovod/runner/js_run.py"]
    assert texts["horovod/tensorflow/mpi_ops.cc"].count("AsGpuStreamValue(Stream* stream)") == 1
    assert "platform_specific_handle().stream" in texts["horovod/tensorflow/mpi_ops.cc"]
    assert "door_->admit()" in texts["third_party/gloo/gloo/transport/tcp/pair.cc"]
    assert all((source / name).read_text() == text for name, text in ADDED.items())


def test_another_source_is_refused(released, tmp_path):
    (released / "horovod" / "runner" / "js_run.py").write_text("changed\n")
    with refuses(TfrepError, file="horovod/runner/js_run.py"):
        build._get_source(tmp_path / "work")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing of CUDA and no driver is installed."""
    for name in (*build._CUDA_VARIABLES, "HOROVOD_NCCL_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "_CUDA_HOMES", ())
    monkeypatch.setattr(hardware, "_SYSTEM_HOMES", ())
    monkeypatch.setattr(hardware, "_wheel_homes", lambda part: [])
    monkeypatch.setattr(build, "_which", lambda tool: None if tool == "nvcc" else "/bin/true")
    monkeypatch.setattr(build, "driver_cuda", lambda: None)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)


def make_toolkit(home: Path, version: str) -> str:
    (home / "bin").mkdir(parents=True)
    (home / "targets" / "x86_64-linux" / "include").mkdir(parents=True)
    (home / "targets" / "x86_64-linux" / "include" / "cuda_runtime.h").touch()
    (home / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.7'\n")
    (home / "bin" / "nvcc").chmod(0o755)
    return str(home)


def make_nccl(home: Path, text: str = "NCCL version 2.27.7+cuda12.9") -> str:
    (home / "lib").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "nccl.h").touch()
    (home / "lib" / "libnccl.so.2").write_text(f"NCCL version %s\0{text}\0")
    return str(home)


def test_missing_tools_are_named(no_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_which", lambda tool: None)
    with pytest.raises(ConfigurationError) as caught:
        build_wheel(["nccl", "mpi"], tmp_path / "cache")
    for tool in ("cmake", "g++", "make", "mpicxx", "nvcc", "nccl.h"):
        assert f"'{tool}'" in str(caught.value)
    assert "Hint: pip install 'cmake<4'" in str(caught.value)
    assert "CUDA_HOME" in str(caught.value)
    assert "pip install nvidia-nccl-cu12" in str(caught.value)


def test_nccl_of_the_wheel_and_a_toolkit_are_enough(no_cuda, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", make_toolkit(tmp_path / "cuda", "12.8"))
    monkeypatch.setattr(hardware, "_wheel_homes", lambda part: [make_nccl(tmp_path / "nvidia" / part)])
    build._check_tools(["nccl"])
    monkeypatch.setattr(hardware, "_wheel_homes", lambda part: [str(tmp_path / "nvidia" / part)])
    environ = build._build_environ(["nccl"])
    assert environ["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert environ["HOROVOD_NCCL_INCLUDE"] == str(tmp_path / "nvidia" / "nccl" / "include")
    assert environ["HOROVOD_NCCL_LIB"] == str(tmp_path / "nvidia" / "nccl" / "lib")
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_GPU_OPERATIONS" not in build._build_environ([])


def test_the_wheel_is_kept_by_what_it_was_built_with(no_cuda, tmp_path, monkeypatch):
    keys = [build._key([]), build._key(["nccl"])]
    for version in ("12.8", "12.9"):
        monkeypatch.setenv("CUDA_HOME", make_toolkit(tmp_path / version, version))
        keys.append(build._key(["nccl"]))
    for version in ("2.27.7", "2.28.3"):
        monkeypatch.setenv("HOROVOD_NCCL_HOME", make_nccl(tmp_path / version, f"NCCL version {version}+cuda12.9"))
        keys.append(build._key(["nccl"]))
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
    keys.append(build._key(["nccl"]))
    monkeypatch.setattr(build, "CHANGES", {})
    keys += [build._key(["nccl"]), build._key([])]
    assert len(set(keys)) == 9
    assert "nccl-cuda12.9-nccl2.28.3-sm80,90" in keys[-3]


@pytest.mark.parametrize(
    ("cuda", "nccl", "named"),
    [
        ("13.0", "12.9", "toolkit is newer than the driver, which runs CUDA up to 12.4. Received: CUDA_HOME="),
        ("12.9", "13.0", "NCCL 2.27.7 is for CUDA 13.0, and the driver runs CUDA up to 12.4"),
    ],
)
def test_what_the_driver_does_not_run_is_refused(no_cuda, tmp_path, monkeypatch, cuda, nccl, named):
    monkeypatch.setattr(build, "driver_cuda", lambda: "12.4")
    monkeypatch.setenv("CUDA_HOME", make_toolkit(tmp_path / "cuda", cuda))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", make_nccl(tmp_path / "nccl", f"NCCL version 2.27.7+cuda{nccl}"))
    with pytest.raises(ConfigurationError) as caught:
        build_wheel(["nccl"], tmp_path / "cache")
    assert named in str(caught.value)


def test_a_tensorflow_without_cuda_has_no_nccl(no_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    with refuses(hint="tensorflow[and-cuda]"):
        build_wheel(["nccl"], tmp_path)


def test_missing_modules_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses(hint="pip install wheel", missing=...):
        build_wheel(cache_dir=tmp_path)


def test_unknown_extra(tmp_path):
    with refuses(extra="ddl"):
        build_wheel(["ddl"], tmp_path)


def test_installing_leaves_dependencies_alone(tmp_path, monkeypatch):
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    install_wheel(tmp_path / "horovod.whl")
    assert [call[:3] for call in calls] == [[sys.executable, "-m", "pip"]] * 2
    assert "--no-deps" in calls[0]
    assert str(tmp_path / "horovod.whl") in calls[0]
    assert {"cloudpickle", "psutil", "pyyaml", "packaging"} <= set(calls[1])


def test_a_failed_installation_shows_what_pip_said(tmp_path):
    (tmp_path / "horovod-0.28.1-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(TfrepError, match="(?s)pip could not install Horovod.*wheel"):
        install_wheel(tmp_path / "horovod-0.28.1-py3-none-any.whl")


def test_status_of_what_is_installed():
    found = status()
    if found.version is None:
        assert "tfrep horovod install" in found.describe()
    else:
        assert found.problem == ""
        assert "gloo" in found.built_in
        assert found.version in found.describe()


def test_status_of_a_horovod_that_does_not_work(monkeypatch):
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "0.28.1")
    monkeypatch.setattr(build, "_PROBE", "raise ImportError('built for another TensorFlow')")
    assert "another TensorFlow" in status().problem
    monkeypatch.setattr(build, "_PROBE", "import os; os.abort()")
    assert status().problem


def test_status_of_an_nccl_that_is_missing_or_of_another_cuda(no_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "0.28.1")
    monkeypatch.setattr(build, "_PROBE", "raise OSError('libnccl.so.2: cannot open shared object file')")
    assert "pip install nvidia-nccl-cu12" in status().problem
    monkeypatch.setattr(build, "_PROBE", 'print("""{"gloo": true, "mpi": false, "nccl": true}""")')
    monkeypatch.setenv("HOROVOD_NCCL_HOME", make_nccl(tmp_path / "nccl", "NCCL version 2.27.7+cuda13.0"))
    assert status() == HorovodStatus("0.28.1", ("gloo", "nccl"))
    monkeypatch.setattr(build, "driver_cuda", lambda: "12.4")
    assert "pip uninstall nvidia-nccl-cu13" in status().problem


def test_describe():
    assert HorovodStatus("0.28.1+tfrep", ("gloo", "mpi")).describe() == "Horovod 0.28.1+tfrep, built with gloo, mpi"
    assert "do not authenticate peers" in HorovodStatus("0.28.1", ("gloo", "mpi")).describe()
    assert "does not work: broken" in HorovodStatus("0.28.1", (), "broken").describe()
