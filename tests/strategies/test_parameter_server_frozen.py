"""Workers, servers and coordinators that are stopped: they are named and ended, and then as those that were killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest
from parameter_server_support import data, dense_model, environ_in, left_behind, run, start

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("servers")

BACKED_UP = Path(__file__).with_name("scripts") / "backed_up.py"
ENDS_WITHIN = 20.0
X, Y = data(2000)


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "10")


def _found(launcher: int, victim: str) -> psutil.Process:
    family = psutil.Process(launcher).children(recursive=True)
    if victim == "coordinator":
        return next(each for each in family if "running.script" in " ".join(each.cmdline()))
    return next(each for each in family if f"/{victim}.log" in os.readlink(f"/proc/{each.pid}/fd/1"))


@pytest.mark.parametrize(
    ("victim", "restarts", "status"),
    [("worker0", 0, 0), ("ps0", 1, 0), ("coordinator", 1, 0), ("ps0", 0, 75), ("coordinator", 0, 124)],
)
def test_the_command(victim: str, restarts: int, status: int, tmp_path: Path) -> None:
    arguments = ["run", "--strategy", "parameter-server", "--workers", "2", "--servers", "1", "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tfrep_strategy.cli", *arguments, str(BACKED_UP)],
        cwd=tmp_path,
        env=environ_in(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("epoch 3"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()[-3000:]
        stopped = _found(process.pid, victim)
        stopped.suspend()
        stopped.wait(ENDS_WITHIN)
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, err[-3000:]
    name = {"worker0": "Worker 0", "ps0": "Parameter server 0", "coordinator": "tfrep: The coordinator"}[victim]
    assert f"\n{name} is stopped (state T), for " in f"\n{err}"
    assert not left_behind(tmp_path)
    if status == 0:
        *epochs, last = out.splitlines()
        assert last == f"ParameterServerStrategy {100 * (int(epochs[-1].split()[1]) + 1)} True"
    assert ("worker 0 ended with code -9, and is started again" in err) == (victim == "worker0")
    assert ("the cluster is started again" in err) == bool(restarts)
    assert ("A parameter server is gone" in err) == (victim == "ps0")


@contextlib.contextmanager
def _training(servers: int) -> Iterator[tuple[Any, Any, keras.Model]]:
    """Gives a cluster of two workers, a strategy, and a model that has trained on it a little."""
    with tfrep.local_cluster(workers=2, servers=servers) as resolver:
        strategy = tfrep.ParameterServerStrategy(resolver)
        with strategy.scope():
            model = dense_model()
        model.fit(X[:100], Y[:100], batch_size=10, verbose=0)
        yield resolver.cluster, strategy, model


def _soon(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(0.4, action)
    thread.start()
    return thread


def _a_worker_is_stopped() -> None:
    with _training(servers=1) as (cluster, _, model):
        first = cluster.pid("worker", 0)

        def stop() -> None:
            os.kill(first, signal.SIGSTOP)
            deadline = time.monotonic() + ENDS_WITHIN
            while cluster.pid("worker", 0) is not None and time.monotonic() < deadline:
                time.sleep(0.1)
            cluster.start("worker", 0)

        stopping = _soon(stop)
        model.fit(X, Y, batch_size=10, epochs=6, verbose=0)
        stopping.join()
        assert cluster.pid("worker", 0) not in (None, first)
        assert int(model.optimizer.iterations) == 10 + 1200, int(model.optimizer.iterations)


def test_a_worker_is_stopped(tmp_path: Path) -> None:
    assert "Worker 0 is stopped (state T), for " in run(_a_worker_is_stopped, folder=tmp_path)


def _a_server_is_stopped() -> None:
    with _training(servers=2) as (cluster, strategy, model):
        _soon(lambda: os.kill(cluster.pid("ps", 1), signal.SIGSTOP))
        began = time.monotonic()
        with tfrep.exit_on_server_loss(strategy):
            try:
                model.fit(X, Y, batch_size=10, epochs=1000, verbose=0)
            finally:
                assert time.monotonic() - began < ENDS_WITHIN


def test_a_server_is_stopped(tmp_path: Path) -> None:
    err = run(_a_server_is_stopped, folder=tmp_path, status=75)
    assert "Parameter server 1 is stopped (state T), for " in err
    assert "tfrep: A parameter server is gone" in err


def _task() -> None:
    strategy = tfrep.ParameterServerStrategy(connect_timeout=100)
    with strategy.scope():
        model = dense_model()
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch or open("trains", "w").close())
    model.fit(X, Y, batch_size=10, epochs=8, verbose=0, callbacks=[stop])
    print("steps", int(model.optimizer.iterations), flush=True)


def test_a_worker_that_tf_config_describes_is_stopped(tmp_path: Path) -> None:
    chief, server, *workers = (f"127.0.0.1:{port}" for port in free_ports(4))
    cluster = {"chief": [chief], "ps": [server], "worker": workers}
    with contextlib.ExitStack() as stack:
        processes = []
        for number, (job, index) in enumerate([("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]):
            folder = tmp_path / str(number)
            folder.mkdir()
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            processes.append(start(_task, folder=folder, TF_CONFIG=config))
            stack.callback(processes[-1].communicate)
            stack.callback(processes[-1].kill)
        coordinator, worker = processes[0], processes[3]
        while not (tmp_path / "0" / "trains").exists():
            assert coordinator.poll() is None
            time.sleep(0.05)
        worker.send_signal(signal.SIGSTOP)
        assert worker.wait(ENDS_WITHIN) == -signal.SIGKILL
        assert "tfrep: Worker 1 is stopped (state T), for " in worker.communicate()[1]
        out, err = coordinator.communicate(timeout=150)
        assert (coordinator.returncode, out) == (0, "steps 1600\n"), err[-3000:]


def _a_debugger_stops_a_worker() -> None:
    with _training(servers=1) as (cluster, _, model):
        first = cluster.pid("worker", 0)
        stopping = _soon(lambda: (os.kill(first, signal.SIGSTOP), time.sleep(8.0), os.kill(first, signal.SIGCONT)))
        model.fit(X, Y, batch_size=10, epochs=6, verbose=0)
        stopping.join()
        assert cluster.pid("worker", 0) == first
        assert int(model.optimizer.iterations) == 10 + 1200, int(model.optimizer.iterations)


def test_under_a_debugger_nobody_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "0")
    assert "is stopped" not in run(_a_debugger_stops_a_worker, folder=tmp_path)
