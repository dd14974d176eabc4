"""A run on two hosts, one of which is cut off. Both are played by processes on this machine, without ssh and without ranks."""

from __future__ import annotations

import os
import queue
import signal

import pytest
from raising import refuses

from tfrep_strategy.running import hosts
from tfrep_strategy.running.on_host import _Listener
from tfrep_strategy.running.ranks import Events
from tfrep_strategy.running.runs import Options

pytestmark = pytest.mark.lane("faults")

LIMIT = 20


@pytest.mark.parametrize(("limit", "ends"), [("0", False), ("600", True)])
def test_how_long_a_host_listens_to_silence(limit: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", limit)
    events: Events = queue.SimpleQueue()
    patience = hosts._given(Options(hosts="localhost:1,127.0.0.1:1"), ["script", "1"])["patience"]
    assert (patience == hosts.SILENCE_SECONDS) if ends else (patience is None)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as pipe, os.fdopen(writing, "wb", 0):
        listener = _Listener(pipe, 0.2 if ends else None)
        listener.events = events
        if ends:
            assert events.get(timeout=LIMIT) == (None, signal.SIGTERM)
        else:
            with pytest.raises(queue.Empty):
                events.get(timeout=0.6)


def test_a_run_through_ssh_is_not_started_again() -> None:
    options = Options(hosts="host1:1,host2:1", max_restarts=1, backup_dir="backups")
    with refuses(hint="--nnodes N --rendezvous", hosts="host1:1,host2:1", max_restarts=1):
        hosts.run_on_hosts(options, ["script", "train.py"], queue.SimpleQueue())
