"""What Horovod's launcher shows to others when it starts ranks on other machines. No rank is started here."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.processes.identity import horovod_is_installed
from tfrep_strategy.running import horovodrun

pytestmark = pytest.mark.skipif(not horovod_is_installed(), reason="Horovod is not installed")
DETACH_FILTER = 27


def test_command_lines_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner import gloo_run, launch
    from horovod.runner.common.util import network
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http import http_server

    for module, name in ((gloo_run, "_slot_info_to_command_fn"), (http_server, "find_port"), (network, "find_port"), (sys, "argv")):
        monkeypatch.setattr(module, name, getattr(module, name))  # Gets back what it has now.
    arguments: list[str] = []
    monkeypatch.setattr(launch, "run_commandline", lambda: arguments.extend(sys.argv))
    monkeypatch.setenv("MY_TOKEN", "sesame")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with pytest.warns(UserWarning, match=r"do not get: .*\bMY_TOKEN\b"):
        horovodrun.main(["localhost:1,192.0.2.7:1", "--gloo", "-np", "2"], [])
    assert arguments == ["horovodrun", "--gloo", "-np", "2"]
    command_of = gloo_run._slot_info_to_command_fn("python train.py", dict(os.environ))
    slots = get_host_assignments(parse_hosts("localhost:1,192.0.2.7:1"), 2)
    for command in map(command_of, slots):
        assert " NCCL_DEBUG=INFO " in command
        assert " PATH=" in command
        assert "sesame" not in command
    rendezvous = http_server.RendezvousServer()
    port = rendezvous.start()
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        rendezvous._httpd.socket.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)  # An error if there is none.
    finally:
        rendezvous.stop()
        rendezvous._httpd.server_close()


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(ConfigurationError, match="from everywhere: the address of no.such.machine.invalid is not known"):
        horovodrun.main(["no.such.machine.invalid:1", "-np", "1"], [])
