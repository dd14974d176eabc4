"""The strategy "auto" of a run: that of `auto_strategy()` in a program that nobody has launched."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import tensorflow as tf
from calling import command

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.hardware import SHARES_MEMORY, gpus_are_visible
from tfrep_strategy.cluster.identity import horovod_is_installed, identities, inherited_environ
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.running import runs
from tfrep_strategy.running.ranks import deferred_signals
from tfrep_strategy.running.runs import Options, Round, run_to_end
from tfrep_strategy.running.scope import run_strategy_scope

pytestmark = pytest.mark.lane("launchers")

LIMIT = 240


def _described(strategy: Any) -> list[Any]:
    of_processes = isinstance(strategy, tfrep.MultiWorkerStrategy)
    return [type(strategy).__name__, strategy.num_replicas_in_sync, strategy.communicator.name if of_processes else None]


def in_run(result: str, cpus: str) -> None:
    tfrep.use_logical_cpus(int(cpus))
    with run_strategy_scope() as strategy:
        Path(result).write_text(json.dumps(_described(strategy)), "utf-8")


@pytest.mark.parametrize(
    ("num_replicas", "cpus", "expected"),
    [
        (None, 2, ["MirroredStrategy", 2, None]),
        (None, 1, ["MultiWorkerStrategy", 1, "single"]),
        (1, 2, ["MultiWorkerStrategy", 1, "single"]),
    ],
)
def test_one_process(num_replicas: int | None, cpus: int, expected: list[Any], tmp_path: Path) -> None:
    with deferred_signals() as events, tempfile.TemporaryDirectory() as notes:
        options = Options(num_replicas, log_dir=tmp_path / "logs", timeout=60)
        arguments = command(in_run, str(tmp_path / "result"), str(cpus))
        run_to_end(options, arguments, Path(notes), events)
    assert json.loads((tmp_path / "result").read_text("utf-8")) == expected


def test_a_program_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_STRATEGY", raising=False)
    assert _described(tfrep.auto_strategy.__wrapped__()) == ["MirroredStrategy", 4, None]  # This process has four logical CPUs.
    one = tf.config.list_logical_devices("CPU")[:1]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: one)
    assert _described(tfrep.auto_strategy.__wrapped__()) == ["MultiWorkerStrategy", 1, "single"]


def test_several_processes_are_the_replicas() -> None:
    assert Options(2).resolved_strategy == Options(hosts="a:2,b:2").resolved_strategy == "multi-worker"
    assert Options(2, strategy="mirrored").resolved_strategy == "mirrored"


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ({}, 0, "1 replica on this machine (CPU); `tfrep run -n 2` starts two"),
        ({"num_replicas": 1}, 0, "1 replica on this machine (CPU)"),
        ({"num_replicas": 2}, 0, "2 replicas on this machine (CPU), tf; logs in logs, kept if it fails"),
        ({"num_replicas": 2, "log_dir": "logs"}, 1, "2 replicas on this machine (1 GPU), tf; logs in logs"),
        ({}, 4, "4 replicas on this machine (4 GPUs), in one process"),
        ({"strategy": "mirrored"}, 4, "4 replicas on this machine (4 GPUs), in one process"),
        ({"strategy": "multi-worker", "log_dir": "logs"}, 4, "4 replicas on this machine (4 GPUs), tf; logs in logs"),
        ({"strategy": "multi-worker"}, 0, "1 replica on this machine (CPU); `tfrep run -n 2` starts two"),
    ],
)
def test_what_a_run_takes_and_says(given: dict[str, Any], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -n it takes all GPUs. On CPUs it says how to get more replicas."""
    monkeypatch.setattr(runs, "visible_gpus", lambda: gpus)
    options = Options(**given)
    assert runs._what_runs(options, Round(0, SimpleQueue()), "tf", Path("logs")) == said
    in_one_process = said.endswith("in one process")
    assert options.processes == (1 if in_one_process else int(said.split()[0]))


on_cpus = pytest.mark.skipif(not SHARES_MEMORY or gpus_are_visible(), reason="shared memory is chosen on Linux, without GPUs")


def made_by_the_program() -> list[Any]:
    """Describes what a program gets that names no communicator, and one that names Horovod."""
    names = ["auto", *(["horovod"] if horovod_is_installed() else [])]
    strategies = [tfrep.MultiWorkerStrategy(name) for name in names]
    sums = [float(strategy.communicator.all_reduce([tf.constant(1.0)])[0]) for strategy in strategies]
    return [[strategy.communicator.name for strategy in strategies], sums]


@on_cpus
def test_ranks_of_one_machine_use_common_memory() -> None:
    found = tfrep.launch(made_by_the_program, strategy=None, timeout=LIMIT)
    names = ["shared_memory", *(["horovod"] if horovod_is_installed() else [])]
    assert found == [[names, [2.0] * len(names)]] * 2


def test_what_a_run_names_is_what_its_program_gets() -> None:
    for name in ("tf", "shared_memory"):
        found = tfrep.launch(lambda: tfrep.MultiWorkerStrategy().communicator.name, strategy=None, communicator=name, timeout=LIMIT)
        assert found == [name] * 2


@contextlib.contextmanager
def torchrun() -> Iterator[list[dict[str, str]]]:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    yield [{"RANK": rank, "LOCAL_RANK": rank} | place for rank in ("0", "1")]


def says_what_it_uses(folder: str) -> None:
    strategy = tfrep.MultiWorkerStrategy()
    total = strategy.run(tf.function(lambda: tfrep.all_sum(1.0)))
    described = [*_described(strategy), float(total), type(strategy.extended.environment).__name__]
    Path(folder, str(strategy.rank)).write_text(json.dumps(described), "utf-8")
    tfrep.barrier()


@on_cpus
@pytest.mark.parametrize(("launcher", "kind"), [(lambda: identities("tf", 2), "TfConfig"), (torchrun, "Torchrun")])
def test_ranks_of_other_launchers_move_to_common_memory(launcher: Any, kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        processes = []
        for own in stack.enter_context(launcher()):
            environ = inherited_environ() | {"CUDA_VISIBLE_DEVICES": ""} | own
            processes.append(subprocess.Popen(command(says_what_it_uses, str(tmp_path)), env=environ))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        assert [process.wait(LIMIT) for process in processes] == [0, 0]
    expected = ["MultiWorkerStrategy", 2, "shared_memory", 2.0, f"{kind}Environment"]
    assert [json.loads((tmp_path / rank).read_text("utf-8")) for rank in "01"] == [expected] * 2
