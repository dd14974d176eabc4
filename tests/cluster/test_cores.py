"""Ranks of one machine share its cores, unless somebody else decides."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster import hardware
from tfrep_strategy.cluster.hardware import THREADS_VARIABLE, cores_of_ranks, is_bound, thread_variables, threads_of_rank
from tfrep_strategy.cluster.identity import identities, inherited_environ

pytestmark = pytest.mark.lane("package")

LIMIT = 240
OWN = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def _nobody_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)


def test_all_ranks_together_take_each_core_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [threads_of_rank(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert (thread_variables(1), thread_variables(4)) == ({}, {THREADS_VARIABLE: "2"})
    monkeypatch.setenv(THREADS_VARIABLE, "5")
    assert thread_variables(4) == {}


@pytest.mark.parametrize(("all_cores", "expected"), [(8, False), (64, True)])
def test_who_is_bound_to_cores(all_cores: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: all_cores)
    assert is_bound() is expected


def told() -> str | None:
    return os.environ.get(THREADS_VARIABLE)


@pytest.mark.parametrize("own", [None, "3"])
def test_ranks_of_a_run(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if own is not None:
        monkeypatch.setenv(THREADS_VARIABLE, own)
    found = tfrep.launch(told, num_replicas=2, communicator="tf", strategy=None, timeout=LIMIT)
    assert found == [own or str(max(1, len(OWN) // 2))] * 2
    assert tfrep.launch(told, num_replicas=1, strategy=None, timeout=LIMIT) == [own]


def asks_for_threads(folder: str, core: str) -> None:
    if core:
        os.sched_setaffinity(0, {int(core)})
    strategy = tfrep.MultiWorkerStrategy("tf")
    Path(folder, str(strategy.rank)).write_text(json.dumps(tf.config.threading.get_intra_op_parallelism_threads()), "utf-8")
    tfrep.barrier()


@pytest.mark.parametrize("binds", [False, True])
def test_ranks_of_another_launcher(binds: bool, tmp_path: Path) -> None:
    numbers = [str(core) if binds else "" for core in sorted(OWN)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, own in enumerate(stack.enter_context(identities("tf", 2))):
            environ = inherited_environ() | {"CUDA_VISIBLE_DEVICES": ""} | own
            asks = command(asks_for_threads, str(tmp_path), numbers[rank % len(numbers)])
            processes.append(subprocess.Popen(asks, env=environ))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        assert [process.wait(LIMIT) for process in processes] == [0, 0]
    is_whole_machine = (1 if binds else len(OWN)) == os.cpu_count()
    expected = threads_of_rank(2) if is_whole_machine else 0  # 0: TensorFlow takes the cores that it may use.
    assert [json.loads((tmp_path / rank).read_text("utf-8")) for rank in "01"] == [expected] * 2


def test_cores_are_cut_into_equal_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 11})
    monkeypatch.setattr(hardware, "_CORES", tmp_path)  # A machine that says nothing of its sockets.
    assert cores_of_ranks(1) == [{2, 3, 5, 7, 11}]
    assert cores_of_ranks(2) == [{2, 3}, {5, 7}]
    assert cores_of_ranks(5) == [{2}, {3}, {5}, {7}, {11}]
    with refuses(ranks=6, cores=5):
        cores_of_ranks(6)


def test_hardware_threads_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two sockets of two cores with two threads each, numbered as Linux does: the first threads of all cores come first."""
    for thread in range(8):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{thread % 2}\n", "utf-8")
        (folder / "core_id").write_text(f"{thread // 2 % 2}\n", "utf-8")
    monkeypatch.setattr(hardware, "_CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores_of_ranks(2) == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert cores_of_ranks(4) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]


BOUND = """
import json, os, pathlib, subprocess, sys, threading
import tfrep_strategy as tfrep
cores = [sorted(os.sched_getaffinity(0))]
thread = threading.Thread(target=lambda: cores.append(sorted(os.sched_getaffinity(0))))
thread.start(), thread.join()
child = [sys.executable, "-c", "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"]
cores.append(json.loads(subprocess.run(child, stdout=subprocess.PIPE, check=True, timeout=60).stdout))
found = {"cores": cores, "parent": os.getppid(), "threads": os.environ["TF_NUM_INTRAOP_THREADS"]}
pathlib.Path(sys.argv[1], "0" if tfrep.is_chief() else "1").write_text(json.dumps(found), "utf-8")
"""


@pytest.mark.skipif(len(OWN) < 2, reason="needs a core for each of two ranks")
def test_ranks_of_a_run_keep_their_cores(tmp_path: Path) -> None:
    script = tmp_path / "bound.py"
    script.write_text(BOUND, "utf-8")
    run = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", "tf", "--bind-cores"]
    environ = inherited_environ() | {"CUDA_VISIBLE_DEVICES": "-1"}
    run += [str(script), str(tmp_path)]
    done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / rank).read_text("utf-8")) for rank in "01"]
    expected = [sorted(own) for own in cores_of_ranks(2)]
    assert [each["cores"] for each in ranks] == [[own] * 3 for own in expected], "of a rank, its threads, and its processes"
    assert [each["threads"] for each in ranks] == [str(len(OWN) // 2)] * 2
    assert os.sched_getaffinity(0) == OWN
