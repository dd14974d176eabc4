"""A run on two hosts, one of which is cut off. Both are played by processes on this machine, without ssh and without ranks."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from test_nodes import SCRIPTS

from tfrep_strategy.processes.ranks import Events
from tfrep_strategy.running import hosts
from tfrep_strategy.running.failures import RunFailed
from tfrep_strategy.running.on_host import _Listener
from tfrep_strategy.running.runs import Options

pytestmark = pytest.mark.lane("faults")

LIMIT = 20


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Events:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hosts, "LAUNCHER", "plays_a_host")
    monkeypatch.setattr(hosts, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(hosts, "_MARGIN_SECONDS", 0.5)
    monkeypatch.setenv("TFREP_GRACE", "1.5")
    return queue.SimpleQueue()


def run(events: Events, asked: int) -> Future[None]:
    """Runs on two hosts, the first of which wants to be asked to end so often."""
    options = Options(hosts="localhost:1,127.0.0.1:1", max_restarts=1, backup_dir="backups")
    found: Future[None] = Future()

    def go() -> None:
        try:
            found.set_result(hosts.run_on_hosts(options, ["script", str(asked)], events))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=go, daemon=True).start()
    return found


def wait_for(file: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not Path(file).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_while_hosts_end_is_not_forgotten(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    running = run(events, 2)
    wait_for("asked-0")
    events.put((None, signal.SIGINT))
    said = r"127\.0\.0\.1 was lost; all ranks were ended\.\nThe run was stopped by SIGINT\."
    with pytest.raises(RunFailed, match=said) as failed:
        running.result(LIMIT)
    assert failed.value.failure.exit_code == 128 + signal.SIGINT
    assert "started again" not in capsys.readouterr().err


def test_a_host_that_is_cut_off_has_time_to_end(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    running = run(events, 1)
    wait_for("asked-0")
    asked_at = time.monotonic()
    running.result(LIMIT)
    assert float(Path("started-1-1").read_text()) - asked_at > 2.5
    said = capsys.readouterr().err
    assert "A host that is cut off may still run its ranks, and ends them by itself. That is awaited, for 3 seconds." in said


def test_a_signal_ends_that_wait(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SILENCE_SECONDS", 1000.0)
    running = run(events, 1)
    wait_for("asked-0")
    time.sleep(0.5)
    events.put((None, signal.SIGTERM))
    with pytest.raises(RunFailed, match=r"The run was stopped by SIGTERM\."):
        running.result(LIMIT)
    assert not Path("started-1-0").exists()


@pytest.mark.parametrize(("limit", "max_restarts", "ends"), [("0", 0, False), ("0", 1, True), ("600", 0, True)])
def test_how_long_a_host_listens_to_silence(
    limit: str, max_restarts: int, ends: bool, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", limit)
    options = Options(hosts="localhost:1,127.0.0.1:1", max_restarts=max_restarts, backup_dir="backups")
    patience = hosts._given(options, ["script", "1"], 0)["patience"]
    assert (patience == 1.0) if ends else (patience is None)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as pipe, os.fdopen(writing, "wb", 0):
        listener = _Listener(pipe, 0.2 if ends else None)
        listener.events = events
        if ends:
            assert events.get(timeout=LIMIT) == (None, signal.SIGTERM)
        else:
            with pytest.raises(queue.Empty):
                events.get(timeout=0.6)
