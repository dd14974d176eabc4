"""Horovod's wheel: built once, kept under the right name, refused with a reason. Small stand-ins replace its source."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import tensorflow as tf

from tfrep_strategy import horovod_build
from tfrep_strategy.errors import ConfigurationError, TfrepError
from tfrep_strategy.horovod_build import HorovodStatus, build_wheel, first_error, install_wheel, status

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
    monkeypatch.setattr(horovod_build, "_get_source", lambda work: shutil.copytree(folder, work / "source"))
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
    assert sorted(path.name for path in wheel.parent.iterdir() if path.suffix != ".whl" and path.name != "lock") == [
        "build.log"
    ]


def test_other_flags_and_another_tensorflow_make_another_wheel(source, tmp_path, monkeypatch):
    monkeypatch.setattr(horovod_build, "_check_tools", lambda extras: None)
    plain = build_wheel(cache_dir=tmp_path)
    with_mpi = build_wheel(["mpi"], tmp_path)
    monkeypatch.setattr(tf, "__version__", "9.9.9")
    newer = build_wheel(cache_dir=tmp_path)
    assert len({plain, with_mpi, newer}) == 3
    assert "11" in source.read_text().split()


def test_the_cache_can_be_named_by_a_variable(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TFREP_CACHE_DIR", str(tmp_path / "named"))
    assert build_wheel().is_relative_to(tmp_path / "named")


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

    monkeypatch.setattr(horovod_build, "_get_source", fail)
    with pytest.raises(TfrepError, match="No matching distribution"):
        build_wheel(cache_dir=tmp_path)


def test_the_source_file_without_headers_is_left_out(tmp_path, monkeypatch):
    folder = tmp_path / "made" / "horovod-0.28.1"
    (folder / "horovod" / "tensorflow").mkdir(parents=True)
    (folder / "horovod" / "tensorflow" / "CMakeLists.txt").write_text('first\n  "x/xla_mpi_ops.cc"\nlast\n')
    (tmp_path / "work").mkdir()

    def download(command: list[str], **options: object) -> None:
        assert "horovod==0.28.1" in command
        shutil.make_archive(str(tmp_path / "work" / "horovod-0.28.1"), "gztar", tmp_path / "made")

    monkeypatch.setattr(subprocess, "run", download)
    source = Path(horovod_build._get_source(tmp_path / "work"))
    assert (source / "horovod" / "tensorflow" / "CMakeLists.txt").read_text() == "first\nlast\n"


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(horovod_build, "_which", lambda tool: None)
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path))
    monkeypatch.setattr(horovod_build, "_NCCL_HOMES", ())
    with pytest.raises(ConfigurationError) as caught:
        build_wheel(["nccl", "mpi"], tmp_path / "cache")
    for tool in ("cmake", "g++", "make", "mpicxx", "nvcc", "nccl.h"):
        assert f"'{tool}'" in str(caught.value)
    assert "Hint: pip install 'cmake<4'" in str(caught.value)


def test_missing_modules_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install wheel"):
        build_wheel(cache_dir=tmp_path)


def test_unknown_extra(tmp_path):
    with pytest.raises(ConfigurationError, match="extra='ddl'"):
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


LOGS = [
    ("[ 3%] Building\na.cc:1:2: error: no type\nb.cc:1:2: error: later\n", "a.cc:1:2: error: no type"),
    ("a.h:3: warning: error prone\nmake: *** [x] Error 1\n", "make: *** [x] Error 1"),
    ("CMake Error at x/CMakeLists.txt:3 (message):\n\n  Could NOT find MPI\n", None),
    (
        "a.o: in function f:\na.cc:(.text+0x1): undefined reference to `g'\n",
        "a.cc:(.text+0x1): undefined reference to `g'",
    ),
    ("nothing\nat all\n", "at all"),
    ("", "no output"),
]


@pytest.mark.parametrize(("log", "expected"), LOGS)
def test_first_error(log, expected):
    assert first_error(log) == (expected or "CMake Error at x/CMakeLists.txt:3 (message): Could NOT find MPI")


def test_status_of_what_is_installed():
    found = status()
    if found.version is None:
        assert "tfrep horovod install" in found.describe()
    else:
        assert found.problem == ""
        assert "gloo" in found.built_in
        assert found.version in found.describe()


def test_status_of_a_horovod_that_does_not_work(monkeypatch):
    monkeypatch.setattr(horovod_build.importlib.metadata, "version", lambda name: "0.28.1")
    monkeypatch.setattr(horovod_build, "_PROBE", "raise ImportError('built for another TensorFlow')")
    assert "another TensorFlow" in status().problem
    monkeypatch.setattr(horovod_build, "_PROBE", "import os; os.abort()")
    assert status().problem


def test_describe():
    assert HorovodStatus("0.28.1", ("gloo", "mpi")).describe() == "Horovod 0.28.1, built with gloo, mpi"
    assert "does not work: broken" in HorovodStatus("0.28.1", (), "broken").describe()
