"""What dies, and what becomes of the training; every case with real processes of its own."""

from __future__ import annotations

import contextlib
import os
import random
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
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("servers")

_SCRIPTS = Path(__file__).with_name("scripts")
X, Y = data(2000)


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print("epoch", epoch, int(self.model.optimizer.iterations), logs["rows"], flush=True)


class Rows(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="rows")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.rows * 1.0


def _after(seconds: float, *actions: Callable[[], object]) -> None:
    """Does one thing after the other, each after some seconds, while the caller goes on."""

    def act() -> None:
        for action in actions:
            time.sleep(seconds)
            action()

    threading.Thread(target=act, daemon=True).start()


@contextlib.contextmanager
def _training(servers: int = 1, **settings: Any) -> Iterator[tuple[Any, Any, keras.Model]]:
    """Gives a cluster of two workers, a strategy, and a model that has trained on it a little."""
    with tfrep.local_cluster(workers=2, servers=servers) as resolver:
        strategy = tfrep.ParameterServerStrategy(resolver, **settings)
        with strategy.scope():
            model = dense_model(metrics=[Rows()])
        model.fit(X[:100], Y[:100], batch_size=10, verbose=0)
        yield resolver.cluster, strategy, model


def _a_worker_dies_and_comes_back() -> None:
    with _training() as (cluster, _, model):
        _after(0.4, lambda: cluster.kill("worker", 0), lambda: cluster.start("worker", 0))
        history = model.fit(X, Y, batch_size=10, epochs=6, verbose=0, callbacks=[Report()]).history
        assert cluster.pid("worker", 0)
        assert history["rows"] == [2000.0] * 6, history["rows"]
        assert int(model.optimizer.iterations) == 10 + 1200, int(model.optimizer.iterations)
        assert history["loss"][-1] < 0.05


def test_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    run(_a_worker_dies_and_comes_back, folder=tmp_path)


def _no_worker_left() -> None:
    with _training(worker_timeout=4) as (cluster, strategy, model):
        _after(0.4, lambda: (cluster.kill("worker", 0), cluster.kill("worker", 1)))
        began = time.monotonic()
        with refuses(tfrep.errors.WorkerError, hint="worker_timeout", workers=...):
            model.fit(X, Y, batch_size=10, epochs=1000, verbose=0)
        assert time.monotonic() - began < 15


def test_no_worker_left(tmp_path: Path) -> None:
    run(_no_worker_left, folder=tmp_path)


def _a_server_dies() -> None:
    with _training(servers=2) as (cluster, strategy, model):
        _after(0.4, lambda: cluster.kill("ps", 1))
        with tfrep.exit_on_server_loss(strategy):
            model.fit(X, Y, batch_size=10, epochs=1000, verbose=0)


def test_a_server_dies(tmp_path: Path) -> None:
    assert "tfrep: A parameter server is gone" in run(_a_server_dies, folder=tmp_path, status=75)


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def _coordinator() -> None:
    with tfrep.local_cluster(workers=2, servers=1) as resolver:
        cluster = resolver.cluster
        print(cluster.pid("worker", 0), cluster.pid("worker", 1), cluster.pid("ps", 0), flush=True)
        time.sleep(100)


def test_the_coordinator_is_killed(tmp_path: Path) -> None:
    process = start(_coordinator, folder=tmp_path)
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(_alive(pids)) == 3
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 10
    while (_alive(pids) or left_behind(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pids)
    assert not left_behind(tmp_path)


def _found(family: list[psutil.Process], module: str) -> psutil.Process:
    return next(process for process in family if module in " ".join(process.cmdline()))


@pytest.mark.parametrize("victim", ["server", "coordinator", "launcher", "nobody, but Ctrl-C"])
def test_the_command(tmp_path: Path, victim: str) -> None:
    arguments = ["run", "--strategy", "parameter-server", "--workers", "2", "--servers", "1", "--max-restarts", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tfrep_strategy.cli", *arguments, str(_SCRIPTS / "backed_up.py")],
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
        family = psutil.Process(process.pid).children(recursive=True)
        if victim == "server":
            # The servers are forks of one process, each with a log of its own.
            next(
                p for p in _found(family, "cluster.local_cluster").children() if "ps0.log" in os.readlink(f"/proc/{p.pid}/fd/1")
            ).kill()
        elif victim == "coordinator":
            _found(family, "running.script").kill()
        else:
            process.send_signal(signal.SIGKILL if victim == "launcher" else signal.SIGINT)
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    pids = [member.pid for member in family]
    deadline = time.monotonic() + 15
    while (_alive(pids) or left_behind(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pids)
    assert not left_behind(tmp_path)
    if victim in ("server", "coordinator"):
        assert process.returncode == 0, err[-3000:]
        assert out.splitlines()[-1] == "ParameterServerStrategy 1500 True"
        assert "the cluster is started again (1 of 1 left)" in err
    else:
        assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 130)


@pytest.mark.parametrize("victim", ["a server", "all servers and workers"])
def test_who_dies_while_the_cluster_starts(tmp_path: Path, victim: str) -> None:
    arguments = ["run", "--strategy", "parameter-server", "--workers", "1", "--servers", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "tfrep_strategy.cli", *arguments, str(_SCRIPTS / "speaks.py")]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ_in(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        killed = False
        while not killed:
            assert process.poll() is None
            with contextlib.suppress(StopIteration, psutil.Error, OSError):
                holder = _found(psutil.Process(process.pid).children(), "cluster.local_cluster")
                if victim == "a server":
                    next(p for p in holder.children() if "ps0.log" in os.readlink(f"/proc/{p.pid}/fd/1")).kill()
                else:
                    holder.kill()
                killed = True
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (0, "once\n"), err[-3000:]
    assert "the cluster is started again (1 of 1 left)" in err
    assert not left_behind(tmp_path)


def test_logs_of_workers_and_servers_are_kept_where_wanted(tmp_path: Path) -> None:
    arguments = ["run", "--strategy", "parameter-server", "--workers", "2", "--servers", "1", "--log-dir", "some/logs"]
    command = [sys.executable, "-m", "tfrep_strategy.cli", *arguments, str(_SCRIPTS / "speaks.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ_in(tmp_path), capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr[-3000:]
    assert sorted(path.name for path in (tmp_path / "some" / "logs").iterdir()) == ["ps0.log", "worker0.log", "worker1.log"]
    assert not left_behind(tmp_path)


def test_a_script_that_gives_up_is_not_started_again(tmp_path: Path) -> None:
    """Its exit code is then above 128, as that of one that was killed."""
    arguments = ["run", "--strategy", "parameter-server", "--workers", "1", "--servers", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "tfrep_strategy.cli", *arguments, str(_SCRIPTS / "speaks.py"), "-1"]
    done = subprocess.run(command, cwd=tmp_path, env=environ_in(tmp_path), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 255, done.stderr[-3000:]
    assert done.stdout == "once\n"


def _twenty_workers_killed() -> None:
    with _training() as (cluster, strategy, model):
        single = dense_model()
        single.set_weights(model.get_weights())
        kills: list[int] = []
        stop = threading.Event()

        def kill_at_random() -> None:
            while len(kills) < 20:
                index = random.randrange(2)
                cluster.kill("worker", index)
                kills.append(index)
                time.sleep(random.uniform(0.05, 0.5))
                cluster.start("worker", index)
                time.sleep(random.uniform(0.5, 1.5))
            stop.set()

        threading.Thread(target=kill_at_random, daemon=True).start()
        epochs = 0
        while not stop.is_set() or epochs < 5:
            history = model.fit(X, Y, batch_size=10, verbose=0).history
            epochs += 1
            assert history["rows"] == [2000.0], history
            assert int(model.optimizer.iterations) == 10 + 200 * epochs
        assert len(kills) == 20
        single.fit(X, Y, batch_size=10, epochs=epochs, verbose=0)
        spread, alone = (m.evaluate(X, Y, verbose=0)[0] for m in (model, single))
        print(epochs, spread, alone)
        assert spread < 1.5 * alone + 0.003


def test_twenty_workers_killed_in_one_training(tmp_path: Path) -> None:
    run(_twenty_workers_killed, folder=tmp_path, seconds=280)
