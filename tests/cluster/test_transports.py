"""What there is to talk through, and which of it "auto" takes: on made-up machines, and on this one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pynvml
import pytest

from tfrep_strategy.cluster import hardware, identity, transports
from tfrep_strategy.cluster.hardware import MOST_SHARING, Nccl, driver_cuda, find_nccl, gpus_are_visible, nccl_problem, visible_gpus
from tfrep_strategy.cluster.horovod import build
from tfrep_strategy.cluster.transports import choose_communicator, horovod_transports

pytestmark = pytest.mark.lane("quick")

GLOO, NCCL = ("gloo",), ("gloo", "nccl")


@pytest.mark.parametrize(
    ("horovod", "gpus", "reachable", "expected", "reason", "hint"),
    [
        (None, False, ("horovod", "tf"), "tf", "not installed", ""),
        (None, True, ("horovod", "tf"), "tf", "not installed", ""),
        (GLOO, False, ("horovod", "tf"), "horovod", "is installed", ""),
        (GLOO, True, ("horovod", "tf"), "tf", "has no NCCL", "tfrep horovod install --with nccl"),
        (("gloo", "mpi"), True, ("horovod", "tf"), "tf", "has no NCCL", "tfrep horovod install --with nccl"),
        (NCCL, True, ("horovod", "tf"), "horovod", "has NCCL", ""),
        (NCCL, False, ("horovod", "tf"), "horovod", "is installed", ""),
        (NCCL, True, ("tf",), "tf", "addresses", ""),
        (GLOO, False, ("horovod",), "horovod", "started for Horovod", ""),
        (GLOO, True, ("horovod",), "horovod", "through the CPU", "tfrep run --communicator tf"),
        (NCCL, True, ("horovod",), "horovod", "started for Horovod", ""),
        (None, True, ("horovod",), "horovod", "started for Horovod", ""),
        (GLOO, True, ("mpi",), "mpi", "mpi4py loads", ""),
        (None, False, ("mpi",), "mpi", "mpi4py loads", ""),
    ],
)
def test_auto(horovod, gpus, reachable, expected, reason, hint):
    choice = choose_communicator(horovod, gpus=gpus, reachable=reachable)
    assert choice.communicator == expected
    assert reason in choice.reason
    assert hint in choice.hint
    assert bool(hint) == bool(choice.hint)


@pytest.mark.parametrize("horovod", [None, GLOO, NCCL])
@pytest.mark.parametrize("reachable", [("horovod", "tf"), ("tf",), ("horovod",)])
def test_auto_where_ranks_share_memory(horovod, reachable):
    choice = choose_communicator(horovod, gpus=False, reachable=reachable, apart_because=None, open_because="another system")
    assert (choice.communicator, choice.hint) == ("shared_memory", "")
    assert choose_communicator(horovod, gpus=False, size=1, apart_because=None).communicator == "tf"
    assert choose_communicator(None, gpus=False, size=MOST_SHARING, apart_because=None).communicator == "shared_memory"
    assert choose_communicator(None, gpus=False, size=MOST_SHARING + 1, apart_because=None).communicator == "tf"
    # On GPUs, and where they cannot, it is what it is elsewhere.
    for gpus, apart in [(True, None), (True, "a limit"), (False, "a limit")]:
        same = choose_communicator(horovod, gpus=gpus, reachable=reachable)
        assert choose_communicator(horovod, gpus=gpus, reachable=reachable, apart_because=apart) == same


@pytest.mark.parametrize("gpus", [True, False])
def test_auto_where_servers_are_open_to_everybody(gpus):
    choice = choose_communicator(GLOO, gpus=gpus, open_because="another system")
    assert (choice.communicator, choice.hint) == ("horovod", "")
    choice = choose_communicator(None, gpus=gpus, open_because="another system")
    assert choice.communicator == "tf"
    assert "has your rights (another system)" in choice.reason
    assert "tfrep horovod install" in choice.hint
    assert choose_communicator(GLOO, gpus=gpus, reachable=["tf"], open_because="another system").communicator == "tf"


@pytest.mark.parametrize(
    ("horovod", "gpus", "apart", "expected", "warned"),
    [
        (GLOO, True, None, "tf", "no NCCL"),
        (NCCL, True, None, "horovod", ""),
        (None, True, None, "tf", ""),
        (GLOO, True, "a limit", "tf", "no NCCL"),
        (GLOO, False, None, "shared_memory", ""),
        (None, False, None, "shared_memory", ""),
        (GLOO, False, "a limit", "horovod", 'Communicator "horovod": shared memory would be faster, .* be used: a limit'),
        (None, False, "a limit", "tf", 'Communicator "tf": shared memory would be faster, .* be used: a limit'),
    ],
)
def test_a_launcher_says_why_it_passes_others_over(monkeypatch, horovod, gpus, apart, expected, warned):
    monkeypatch.setattr(identity, "horovod_transports", lambda: horovod)
    monkeypatch.setattr(identity, "problem_of_sharing", lambda size: apart)
    monkeypatch.setattr(identity, "gpus_are_visible", lambda: gpus)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert identity.resolve_communicator("auto") == expected
    assert len(caught) == bool(warned)
    assert all(re.search(warned, str(each.message)) for each in caught)


@pytest.mark.lane("short")
def test_what_horovods_library_has_is_what_horovod_says():
    found = build.status()
    assert horovod_transports() == (None if found.version is None else tuple(sorted(found.built_in)))


@pytest.mark.parametrize("built_in", [("gloo",), ("gloo", "mpi"), ("gloo", "nccl"), ("gloo", "mpi", "nccl")])
def test_transports_of_a_made_up_library(tmp_path, monkeypatch, built_in):
    classes = b"\0".join(transports.HOROVOD_TRANSPORTS[name].encode() + b"E" for name in built_in)
    (tmp_path / "mpi_lib.so").write_bytes(b"\x7fELF 13NCCLAllreduceOf\0" + classes + b"\0")
    monkeypatch.setattr(transports, "horovod_library", lambda: tmp_path / "mpi_lib.so")
    assert horovod_transports() == built_in
    monkeypatch.setattr(transports, "horovod_library", lambda: None)
    assert horovod_transports() is None


@pytest.mark.parametrize(
    ("count", "chosen", "visible"),
    [(0, None, 0), (8, None, 8), (8, "3", 1), (8, "0,7,8,1", 2), (8, "", 0), (8, "-1", 0), (8, "1,-1,2", 1), (1, "GPU-6f2b", 1)],
)
def test_visible_gpus_of_a_made_up_driver(monkeypatch, count, chosen, visible):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 12080)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == visible
    assert gpus_are_visible() is (visible > 0)
    assert driver_cuda() == "12.8"


def test_no_driver(monkeypatch):
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert gpus_are_visible() is False
    assert driver_cuda() is None


def test_nccl_is_looked_for_where_it_is_loaded_from(tmp_path, monkeypatch):
    def library(name: str, text: str) -> Path:
        path = tmp_path / name / "lib" / "libnccl.so.2"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    monkeypatch.setattr(hardware, "_SYSTEM_HOMES", [str(tmp_path / "system")])
    monkeypatch.setattr(hardware, "_wheel_homes", lambda part: [str(tmp_path / "wheel")])
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'named' / 'lib'}")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "own"))
    assert find_nccl() is None
    assert "pip install nvidia-nccl-cu12" in nccl_problem(None, "12.8")
    assert find_nccl() is None
    system = library("system", "no version")
    assert find_nccl() == Nccl(system)
    wheel = library("wheel", "NCCL version %s\0NCCL version 2.27.7+cuda12.9\0")
    assert find_nccl() == Nccl(wheel, "2.27.7", "12.9")
    named = library("named", "NCCL version 2.28.3+cuda13.0\0")
    assert find_nccl() == Nccl(named, "2.28.3", "13.0")
    own = library("own", "no version")
    assert find_nccl() == Nccl(own)
    (tmp_path / "own" / "include").mkdir()
    (tmp_path / "own" / "include" / "nccl.h").touch()
    assert Nccl(own).header == tmp_path / "own" / "include" / "nccl.h"


@pytest.mark.parametrize(
    ("cuda", "driver", "fine"),
    [("12.9", "12.2", True), ("13.0", "12.8", False), ("12.9", "13.0", True), ("13.0", None, True), ("", "12.8", True)],
)
def test_nccl_of_another_cuda(cuda, driver, fine):
    problem = nccl_problem(Nccl(Path("/wheel/libnccl.so.2"), "2.27.7", cuda), driver)
    assert (not problem) is fine
    if not fine:
        assert "pip uninstall nvidia-nccl-cu13" in problem
        assert "nvidia-nccl-cu12" in problem
