"""Many ranks at once, over real connections. They are threads of this process."""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tfrep_strategy.cluster.rendezvous.channel import connect
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.communicators.peers.hub import Hub
from tfrep_strategy.communicators.peers.reports import TO_RANKS

sys.path.append(str(Path(__file__).resolve().parents[3]))

MANY = 128


def test_many_ranks_join_agree_lose_one_and_leave() -> None:
    from benchmarks.control_plane_crowd import Crowd

    [port] = free_ports(1)
    crowd = Crowd(range(MANY), MANY, f"127.0.0.1:{port}")
    crowd.join()
    assert sorted(crowd.monitors) == list(range(MANY))
    hub = crowd.monitors[0]._hub
    crowd.agree(3)
    deadline = time.monotonic() + 10.0
    while hub._rounds:  # It forgets what it has told all.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    died = crowd.lose(MANY - 1)
    assert 0.0 < crowd.heard(MANY - 1) - died < 10.0
    for monitor in crowd.monitors.values():
        assert [(each.rank, each.lost) for each in monitor.ended] == [(MANY - 1, True)]
    crowd.leave()
    assert not hub._thread.is_alive()
    assert not any(monitor._thread.is_alive() for monitor in crowd.monitors.values())


def test_more_ranks_than_are_greeted_at_once_are_all_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.introductions._MOST_AT_ONCE", 2)
    size = 100
    hub = Hub(size, True, 20.0)
    with ThreadPoolExecutor(size) as threads, contextlib.ExitStack() as stack:
        connections = list(threads.map(lambda rank: connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", rank), range(size)))
        assert None not in connections
        for connection in connections:
            stack.enter_context(connection)
        connections[1].send("ended", False, None)
        assert connections[size - 1].poll(10.0)
        assert connections[size - 1].receive() == ("ended", [(1, False, None)])
        connections[0].send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()


def test_those_that_end_together_are_told_in_few_messages() -> None:
    """As when training ends: a message for each would be as many as there are pairs of ranks."""
    size = 200
    hub = Hub(size, True, 20.0)
    with ThreadPoolExecutor(size) as threads, contextlib.ExitStack() as stack:
        connections = list(threads.map(lambda rank: connect(["127.0.0.1"], hub.port, hub.key, TO_RANKS, "rank", rank), range(size)))
        for connection in connections:
            stack.enter_context(connection)
        for connection in connections[2:]:
            connection.send("ended", False, None)
        ended: list[int] = []
        messages, deadline = 0, time.monotonic() + 20.0
        while len(ended) < size - 2 and time.monotonic() < deadline:
            assert connections[1].poll(10.0)
            messages += 1
            ended += [rank for rank, _, _ in connections[1].receive()[1]]
        assert sorted(ended) == list(range(2, size))
        assert messages < size / 2
        connections[0].send("ended", False, None)
        hub.join()
    assert not hub._thread.is_alive()
