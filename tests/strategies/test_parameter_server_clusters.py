"""One script on all tasks of a cluster: who does what is told by `TF_CONFIG` or Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from parameter_server_support import start

from tfrep_strategy.launch.identity import free_ports

_SCRIPT = """
strategy = tfrep.ParameterServerStrategy(connect_timeout=100)  # Several imports at once take a while.
with strategy.scope():
    model = dense_model()
model.fit(*data(), batch_size=32, verbose=0)
print("steps", int(model.optimizer.iterations), flush=True)
"""


def _tf_config() -> list[dict[str, str]]:
    chief, server, worker = (f"127.0.0.1:{port}" for port in free_ports(3))
    jobs = {"chief": [chief], "ps": [server], "worker": [worker]}
    cluster = jobs | {"evaluator": ["127.0.0.1:1"]}  # Who takes no part, and does not serve.
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})} for job in jobs]


def _slurm() -> list[dict[str, str]]:
    job = free_ports(1)[0] % 20_000  # From which all tasks compute the same ports.
    common = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "3"} for rank in range(3)]


@pytest.mark.parametrize("tasks", [_tf_config, _slurm], ids=["TF_CONFIG", "Slurm"])
def test_one_script_on_all_tasks(tmp_path: Path, tasks: object) -> None:
    processes: list[subprocess.Popen[str]] = []
    try:
        for index, environ in enumerate(tasks()):  # type: ignore[operator]
            folder = tmp_path / str(index)
            folder.mkdir()
            processes.append(start(_SCRIPT, folder=folder, **environ))
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


def test_a_server_does_not_wait_for_ever_for_a_coordinator(tmp_path: Path) -> None:
    """Under Slurm, where the job would last as long as it waits."""
    process = start("tfrep.ParameterServerStrategy(coordinator_timeout=0.5)", folder=tmp_path, **_slurm()[1])
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "has not come after 0.5 seconds" in err
