"""Ranks that another launcher has started: horovodrun, or variables as mpirun, srun and TF_CONFIG set them.

`tests/engines` starts the real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from calling import command
from needs import needs_horovod
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.communicators import SingleCommunicator

pytestmark = pytest.mark.lane("launchers")

ROOT = str(Path(tfrep.__file__).parents[1])
LIMIT = 150

SCRIPTS = Path(__file__).with_name("scripts")

TASKS = {
    "MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "Horovod": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
    "Slurm": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"},
    "TF_CONFIG": {
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}),
    },
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    "TrainJob": {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
    "indexed Job": {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
}


def environ(**own: str) -> dict[str, str]:
    return inherited_environ() | {"PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"} | own


def found_in(output: str) -> list[dict[str, object]]:
    # Every process has printed one line, though horovodrun may put two into one.
    return [json.loads(text.partition("}")[0] + "}") for text in output.split("FOUND ")[1:]]


def outputs_of(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Returns what processes wrote to standard output and error. All have ended with exit code 0."""
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    assert {process.returncode for process in processes} == {0}, [error[-3000:] for _, error in outputs]
    return outputs


def check_all(found: Sequence[dict[str, object]], communicator: str) -> None:
    assert [each.pop("failure") for each in sorted(found, key=str)] == ["FileExistsError", "PeerError"]
    assert found[0] == found[1]
    assert len(found) == found[0]["size"] == 2
    assert found[0]["ranks"] == [0, 1]
    assert found[0]["communicator"] == communicator


@needs_horovod
def test_horovodrun_starts_the_ranks(tmp_path: Path) -> None:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    done = subprocess.run(
        [horovodrun, "-np", "2", sys.executable, str(SCRIPTS / "joins.py")],
        cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    check_all(found_in(done.stdout), "horovod")


def test_hosts_that_are_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfrep_strategy.cli", "run", "--hosts", "localhost:1,127.0.0.1:1", str(SCRIPTS / "hashes.py")],
        cwd=tmp_path, env=environ(TFREP_SSH="no-such-ssh"), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"hashes \{-?\d+\}", done.stdout), done.stdout


def _tasks_of_slurm() -> list[dict[str, str]]:
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(free_ports(1)[0] % 20_000), "SLURM_STEP_NODELIST": "localhost"}
    return [common | {"SLURM_PROCID": str(rank)} for rank in range(2)]


def _tasks_of_torchrun() -> list[dict[str, str]]:
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0])}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.mark.parametrize("tasks", [_tasks_of_slurm, _tasks_of_torchrun])
def test_tfrep_run_in_tasks_becomes_their_ranks(tasks: Callable[[], list[dict[str, str]]], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", str(SCRIPTS / "joins.py"), "--epochs", "3"]
    processes = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environ(**task, XDG_CACHE_HOME=str(tmp_path / "cache")), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for task in tasks()
    ]  # fmt: skip
    outputs = outputs_of(processes)
    said = [line for _, errors in outputs for line in errors.splitlines() if line.startswith("tfrep: ")]
    assert said == ["tfrep: 2 replicas on this machine (CPU), shared_memory"]
    found = [each for output, _ in outputs for each in found_in(output)]
    assert all("hash" in each and each["argv"] == ["--epochs", "3"] for each in found)
    check_all(found, "shared_memory")


def _train_alone(cases: str, *packages: str) -> None:
    sys.path[:0] = packages
    import horovod.tensorflow as hvd

    assert not hvd.mpi_built()
    warnings.simplefilter("always")
    messages = []
    for variables, name in json.loads(cases):
        os.environ.update(variables)
        with pytest.raises(tfrep.errors.ConfigurationError) as refused:
            tfrep.MultiWorkerStrategy(SingleCommunicator() if name == "own" else name)
        messages.append(str(refused.value))
        with refuses(environment=...):
            tfrep.barrier()
        for variable in variables:
            del os.environ[variable]
    print(json.dumps(messages))


def _check_that_nobody_trains_alone(cases: Sequence[tuple[str, str]], folder: Path, *packages: str) -> str:
    """Returns what the process wrote to standard error."""
    done = subprocess.run(
        command(_train_alone, json.dumps([(TASKS[name], communicator) for name, communicator in cases]), *packages),
        cwd=folder, env=environ(), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    messages = json.loads(done.stdout)
    assert len(messages) == len(cases)
    for (name, _), text in zip(cases, messages, strict=True):
        assert f"According to {name} this process is rank 1 of 2, but its communicator says rank 0 of 1." in text
        assert "tfrep horovod install --with mpi" in text
        assert ("Hint: set MASTER_ADDR and MASTER_PORT" in text) == (name == "MPI")
        assert all(variable in text for variable in TASKS[name])
    return done.stderr


@needs_horovod
def test_nobody_trains_alone(tmp_path: Path) -> None:
    """What mpirun and srun start cannot talk through a Horovod that has Gloo only, nor through what connects nobody."""
    cases = [("MPI", "auto"), ("MPI", "horovod"), ("Slurm", "horovod"), ("TF_CONFIG", "own"), ("Slurm", "own")]
    cases += [(name, communicator) for name in ("torchrun", "TrainJob", "indexed Job") for communicator in ("own", "horovod")]
    _check_that_nobody_trains_alone(cases, tmp_path)


@needs_horovod
def test_mpi4py_without_an_mpi(tmp_path: Path) -> None:
    """The wheels of mpi4py bring no MPI. "auto" takes Horovod then, and says what mpi4py lacks."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')", "utf-8")
    said = _check_that_nobody_trains_alone([("MPI", "auto")], tmp_path, str(tmp_path))
    assert 'The communicator "mpi" cannot be used. mpi4py does not load: cannot load MPI library' in said


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Makes this process look like a task of each launcher in turn, in a folder with a script."""
    for name, value in TASKS[request.param].items():
        monkeypatch.setenv(name, value)
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    return str(request.param)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "4"], "num_replicas=4"),
        (["-n", "1"], "num_replicas=1"),
        (["--hosts", "a:2"], "hosts='a:2'"),
        (["--max-restarts", "3"], "max_restarts=3"),
        (["--bind-cores"], "bind_cores=True"),
        (["--strategy", "mirrored"], "strategy='mirrored'"),
        (["--strategy", "parameter-server"], "`tfrep run --strategy parameter-server`"),
    ],
)
def test_runs_in_tasks_are_refused(
    task: str, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tfrep_strategy.cli import main

    monkeypatch.setattr(sys, "argv", ["tfrep", "run", *arguments, "script.py"])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "This process is one of 2 that another launcher has started" in error
    assert named in error
    assert f"environment='{task}: rank 1 of 2" in error


def test_a_rank_of_a_run_starts_no_other(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfrep_strategy.contrib.demo import run_demo
    from tfrep_strategy.running import Options, run_script

    with refuses(code="TFREP-E007", told=["`tfrep demo`"]):
        run_demo(None)
    monkeypatch.setenv("TFREP_NUM_REPLICAS", "2")  # Of the `tfrep run` that has made this process a rank.
    with refuses(code="TFREP-E007", hint="call it outside of a run"):
        run_script("script.py", [], Options())


def test_launch_in_a_task_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASKS["Slurm"].items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="in each of the 2 processes that another launcher has started"):
        assert tfrep.launch(os.getpid, num_replicas=1, strategy=None, communicator="tf", timeout=LIMIT)
