"""One script on all tasks of a cluster: who does what is told by `TF_CONFIG` or Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from parameter_server_support import data, dense_model, start
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("servers")

_PS, _WORKER = ["127.0.0.1:1"], ["127.0.0.1:2"]


def _task() -> None:
    strategy = tfrep.ParameterServerStrategy(connect_timeout=100)  # Several imports at once take a while.
    with strategy.scope():
        model = dense_model()
    model.fit(*data(), batch_size=32, verbose=0)
    print("steps", int(model.optimizer.iterations), flush=True)


def _impatient_server() -> None:
    tfrep.ParameterServerStrategy(coordinator_timeout=0.5)


def _tf_config() -> list[dict[str, str]]:
    chief, server, worker = (f"127.0.0.1:{port}" for port in free_ports(3))
    jobs = {"chief": [chief], "ps": [server], "worker": [worker]}
    cluster = jobs | {"evaluator": ["127.0.0.1:1"]}  # Who takes no part, and does not serve.
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})} for job in jobs]


def _slurm() -> list[dict[str, str]]:
    job = free_ports(1)[0] % 20_000  # From which all tasks compute the same ports.
    common = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "3"} for rank in range(3)]


def _spec_resolver(cluster: dict[str, list[str]], task: dict[str, Any]) -> Any:
    spec = tf.train.ClusterSpec(cluster)
    kind, index = task.get("type"), task.get("index")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=kind, task_id=index, rpc_layer="grpc")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("through", ["TF_CONFIG", "a resolver"])
@pytest.mark.parametrize(
    ("more_jobs", "task", "received"),
    [
        ({}, {"type": "wroker", "index": 0}, {"type": "wroker"}),
        ({}, {"type": ["worker"], "index": 0}, {"type": ...}),
        ({}, {"type": "chief", "index": 0}, {"type": "chief"}),
        ({}, {"type": "worker", "index": 1}, {"index": 1}),
        ({}, {"type": "ps", "index": -1}, {"index": -1}),
        ({}, {"type": "ps"}, {"index": None}),
        ({"chief": ["127.0.0.1:3", "127.0.0.1:4"]}, {"type": "chief", "index": 0}, {"chief": ["127.0.0.1:3", "127.0.0.1:4"]}),
        ({"evaluator": ["127.0.0.1:3", "127.0.0.1:4"]}, {}, {"evaluator": ["127.0.0.1:3", "127.0.0.1:4"]}),
        ({"master": ["127.0.0.1:3"]}, {}, {"jobs": ["master"]}),
    ],
)
def test_a_bad_cluster_is_refused_before_anybody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, through: str, more_jobs: Any, task: Any, received: dict[str, Any]
) -> None:
    cluster = {"ps": _PS, "worker": _WORKER, **more_jobs}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    resolver = None if through == "TF_CONFIG" else _spec_resolver(cluster, task)
    with refuses(**received):
        tfrep.ParameterServerStrategy(resolver)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "config",
    [
        "worker",
        '{"cluster": [1]}',
        '{"cluster": {"ps": ["a:1"]}, "task": {"index": "first"}}',
        pytest.param('{"cluster":' * 10_000, id="deep"),
    ],
)
def test_a_tf_config_that_cannot_be_read_is_shown(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    with refuses(TF_CONFIG=...):
        tfrep.ParameterServerStrategy()


@pytest.mark.parametrize("tasks", [_tf_config, _slurm], ids=["TF_CONFIG", "Slurm"])
def test_one_script_on_all_tasks(tmp_path: Path, tasks: object) -> None:
    processes: list[subprocess.Popen[str]] = []
    try:
        for index, environ in enumerate(tasks()):  # type: ignore[operator]
            folder = tmp_path / str(index)
            folder.mkdir()
            processes.append(start(_task, folder=folder, **environ))
        out, err = processes[0].communicate(timeout=200)
        assert processes[0].returncode == 0, err[-3000:]
        assert out == "steps 20\n"
        for server in processes[1:]:
            if tasks is _slurm:  # Its job would last as long as they do.
                assert server.wait(40) == 0
            else:
                assert server.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_example_learns(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "parameter_servers.py"
    command = [sys.executable, str(example), "--epochs", "3", "--steps", "40"]
    paths = os.pathsep.join(filter(None, sys.path))
    environ = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss"][-1] < 0.8 * found["loss"][0]
    assert {path.name for path in tmp_path.iterdir()} == {"ratings.keras"}


def test_a_server_does_not_wait_for_ever_for_a_coordinator(tmp_path: Path) -> None:
    """Under Slurm, where the job would last as long as it waits."""
    process = start(_impatient_server, folder=tmp_path, **_slurm()[1])
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "has not connected within 0.5 seconds" in err
