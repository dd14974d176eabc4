"""The coordinator of a cluster that `tfrep run` has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from raising import refuses
from test_joining import SCRIPTS, environ

from tfrep_strategy.errors import PeerError
from tfrep_strategy.running.coordinator import ClusterOptions, _RestartingCluster, run_coordinator

pytestmark = pytest.mark.lane("servers")


def test_a_coordinator_that_is_asked_to_end_has_the_grace_time(tmp_path: Path) -> None:
    """More than the three seconds that it has by default."""
    run = [sys.executable, "-m", "tfrep_strategy.cli", "run", "--strategy", "parameter-server", "--workers", "1"]
    saved = tmp_path / "saved"
    command, own = [*run, str(SCRIPTS / "ends_slowly.py"), "4.5", str(saved)], environ(TFREP_GRACE="60")
    with subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(90) == -signal.SIGTERM
    assert saved.exists()


def test_a_grace_time_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("TFREP_GRACE", "abc")
    with refuses(TFREP_GRACE="abc"):
        run_coordinator(str(tmp_path / "train.py"), [], ClusterOptions())


def test_a_worker_that_ends_at_once_is_started_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfrep_strategy.running.coordinator._SHORT_LIFE_SECONDS", 60.0)
    monkeypatch.setattr("tfrep_strategy.running.coordinator._FIRST_PAUSE", 1.0)
    started = threading.Semaphore(0)
    starts = []

    class Counting(_RestartingCluster):
        def start(self, job: str, index: int) -> None:
            super().start(job, index)
            if job == "worker":
                starts.append(time.monotonic())
                started.release()

    with Counting(1, 1, None) as cluster:
        for _ in range(3):
            assert started.acquire(timeout=60)
            cluster.kill("worker", 0)
        assert started.acquire(timeout=60)
    assert starts[2] - starts[1] > 1.0
    assert starts[3] - starts[2] > 2.0


def test_a_worker_that_cannot_be_started_again_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried = threading.Event()

    def fail(*_: object) -> None:
        tried.set()
        raise PeerError("A task of the cluster does not start.")

    with _RestartingCluster(1, 1, None) as cluster:
        monkeypatch.setattr(cluster, "start", fail)
        cluster.kill("worker", 0)
        assert tried.wait(60)
        for thread in threading.enumerate():
            if getattr(thread, "_target", None) == cluster._start_again:
                thread.join(60)
    assert "worker 0 was not started again. A task of the cluster does not start." in capsys.readouterr().err
