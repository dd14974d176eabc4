"""Ports that a run picks: nobody else is given them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
from raising import refuses

from tfrep_strategy.cluster.rendezvous import connections
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("quick")


def test_picked_ports_are_not_given_away() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    state = random.getstate()
    found = free_ports(50)
    assert random.getstate() == state
    assert len(set(found)) == 50
    assert not [port for port in found if lowest <= port <= highest]
    for port in found:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_ports_that_are_taken_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(connections, "_chosen_ports", lambda most: iter([port, port]))
        assert port not in free_ports(2)


def test_where_nothing_is_told_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connections, "_GIVEN_PORTS", tmp_path / "absent")
    assert len(set(free_ports(3))) == 3


def test_an_address_of_another_machine() -> None:
    with refuses(count=1):
        free_ports(1, "192.0.2.1")
