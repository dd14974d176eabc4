"""Sockets that listen on all interfaces, and who gets through to them. The loopback interface has many addresses to come from."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from networks import ORDINARY
from raising import refuses

from tfrep_strategy.cluster.rendezvous.confinement import confine, confined, is_this_machine, machines_of_run, problem_of_confining
from tfrep_strategy.cluster.rendezvous.connections import free_ports, held_ports
from tfrep_strategy.core.limits import trusted_networks

SCRIPT = Path(__file__).parent / "scripts" / "is_confined.py"
PATIENCE = 0.3
"""Seconds after which a connection has failed. The kernel answers at once, on a slow machine too."""

pytestmark = [
    pytest.mark.lane("quick"),
    pytest.mark.skipif(problem_of_confining() is not None, reason=f"sockets are open here: {problem_of_confining()}"),
]


def _may_filter() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        confine(server, [])
        return True
    return False


needs_filters = pytest.mark.skipif(not _may_filter(), reason="this kernel lets only administrators filter what comes to a socket")


@pytest.fixture(params=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """What listens on all interfaces; as TensorFlow does, an IPv6 socket takes both kinds of addresses."""
    if request.param == "IPv6" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    options = {"family": socket.AF_INET6, "dualstack_ipv6": True} if request.param == "IPv6" else {}
    with socket.create_server(("", 0), **options) as made:
        yield made


def comes(source: str, server: socket.socket) -> bool:
    """Whether somebody from an address of the loopback interface can connect."""
    return reaches(source, server.getsockname()[1])


def reaches(source: str, port: int) -> bool:
    """Whether somebody from an address of the loopback interface can connect to a port."""
    target = ("::1" if ":" in source else "127.0.0.1", port)
    with contextlib.suppress(OSError):
        socket.create_connection(target, PATIENCE, source_address=(source, 0)).close()
        return True
    return False


def listening(port: int) -> socket.socket:
    """What listens as TensorFlow does, if it is told to share its port."""
    family, both = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, reuse_port=True)


@needs_filters
@pytest.mark.parametrize(
    ("networks", "let_in", "kept_out"),
    [
        (["127.0.0.2/32"], ["127.0.0.2"], ["127.0.0.1", "127.0.0.3", "127.0.1.2"]),
        (["127.1.0.0/16", "127.0.0.9/32"], ["127.1.2.3", "127.1.0.1", "127.0.0.9"], ["127.0.0.1", "127.2.0.1"]),
        (["fd00::/8", "127.0.0.2/32"], ["127.0.0.2"], ["127.0.0.1"]),
        ([], [], ["127.0.0.1"]),
    ],
)
def test_a_filter(networks: list[str], let_in: list[str], kept_out: list[str], server: socket.socket) -> None:
    assert comes("127.0.0.1", server)
    confine(server, [ipaddress.ip_network(each) for each in networks])
    assert {source: comes(source, server) for source in (*let_in, *kept_out)} == {
        **dict.fromkeys(let_in, True),
        **dict.fromkeys(kept_out, False),
    }


@needs_filters
def test_a_run_of_this_machine_may_name_it_by_another_interface(server: socket.socket) -> None:
    numbers = [each.address for some in psutil.net_if_addrs().values() for each in some if each.family == socket.AF_INET]
    own = next((number for number in numbers if not number.startswith("127.")), None)
    if own is None:
        pytest.skip("this machine has the loopback interface only")
    port = server.getsockname()[1]
    networks, problem = machines_of_run(f"{own}:{port}", [f"{own}:{port}", f"{own}:1"])
    assert problem is None
    assert is_this_machine(own)
    assert not is_this_machine("192.0.2.1")  # An address for documents.
    confine(server, networks)
    socket.create_connection((own, port), PATIENCE).close()
    assert comes("127.0.0.1", server)


@needs_filters
@pytest.mark.parametrize(
    ("networks", "is_let_in"),
    [
        (["::1/128"], True),
        (["::/64"], True),
        (["fd00::/8", "1::1/128", "::1/128"], True),
        (["::2/128"], False),
        (["127.0.0.0/8"], False),
    ],
)
def test_a_filter_of_ipv6(networks: list[str], is_let_in: bool) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        assert comes("::1", server)
        confine(server, [ipaddress.ip_network(each) for each in networks])
        assert comes("::1", server) is is_let_in


@needs_filters
def test_as_many_machines_as_a_filter_takes(server: socket.socket) -> None:
    many = [ipaddress.ip_network((0x0A000000 + 2 * i, 32)) for i in range(1000)]
    confine(server, [*many, ipaddress.ip_network("127.0.0.5")])
    assert comes("127.0.0.5", server)
    assert not comes("127.0.0.6", server)
    with pytest.raises(OSError, match="too many addresses"):
        confine(server, [ipaddress.ip_network((0x0A000000 + 2 * i, 32)) for i in range(2000)])


@pytest.fixture
def friends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machines of the run, as far as servers know."""
    known = ["127.0.0.2"]
    networks = [ipaddress.ip_network(each) for each in known]
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.confinement.machines_of_run", lambda *others: (networks, None))
    return known


def test_strangers_come_to_the_door_before_and_after_the_server_listens(friends: list[str]) -> None:
    (port,) = free_ports(1, "")
    with confined(f"127.0.0.1:{port}", []):
        assert not comes_through("127.0.0.2", port)
        server = listening(port)
        check_only_friends(server)
    with server:
        check_only_friends(server)
    assert "TF_GRPC_REUSE_PORT" not in os.environ


def comes_through(source: str, port: int) -> bool:
    """Whether somebody gets a connection that stays: one that the door takes is hung up at once."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE, source_address=(source, 0)) as link:
        try:
            return bool(link.recv(1))
        except TimeoutError:
            return True
    return False


def check_only_friends(server: socket.socket) -> None:
    server.setblocking(False)
    port = server.getsockname()[1]
    assert [comes_through("127.0.0.2", port) for _ in range(5)] == [True] * 5
    assert [comes_through("127.0.0.3", port) for _ in range(5)] == [False] * 5
    for _ in range(5):
        server.accept()[0].close()
    with pytest.raises(BlockingIOError):
        server.accept()


def test_a_name_that_becomes_known_while_the_server_starts(friends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [([], "the address of late is not known"), ([ipaddress.ip_network(each) for each in friends], None)]
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.confinement.machines_of_run", lambda *others: found.pop(0))
    (port,) = free_ports(1, "")
    with confined(f"127.0.0.1:{port}", ["late:1"]):
        server = listening(port)
        assert comes_through("127.0.0.3", port)
        server.accept()[0].close()
    with server:
        check_only_friends(server)


def test_a_port_that_is_in_use_is_left_to_tensorflow() -> None:
    (port,) = free_ports(1, "")
    with listening(port), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with confined(f"127.0.0.1:{port}", []):
            assert "TF_GRPC_REUSE_PORT" not in os.environ
            assert reaches("127.0.0.1", port)
    assert "in use" in str(warned[0].message)


def test_a_server_that_does_not_start_leaves_its_port_free() -> None:
    (port,) = free_ports(1, "")
    with pytest.raises(RuntimeError, match="no server"), confined(f"127.0.0.1:{port}", []):
        raise RuntimeError("no server")
    socket.create_server(("", port)).close()


def test_a_door_stays_when_python_ends_before_the_server() -> None:
    """Modules are cleared then, and TensorFlow's server still listens."""
    program = """
import gc, os, socket, sys, psutil
from tfrep_strategy.cluster.rendezvous import confinement
from tfrep_strategy.cluster.rendezvous.connections import free_ports
own, other = (f"127.0.0.1:{port}" for port in free_ports(2))
with confinement.confined(own, [own, other]):
    server = socket.create_server(("", int(own[10:])), reuse_port=True).detach()
vars(confinement).clear()
gc.collect()
print(sum(each.laddr.port == int(own[10:]) for each in psutil.Process().net_connections("tcp")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2\n"


def test_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TRUSTED_NETWORKS", "192.0.2.0/24")
    networks, problem = machines_of_run("127.0.0.1:1", ["127.0.0.1:1", "198.51.100.7:1"])
    assert problem is None
    assert {"127.0.0.0/8", "192.0.2.0/24", "198.51.100.7/32"} <= {str(each) for each in networks}


def test_a_port_is_held_for_those_who_know_it() -> None:
    """As for a rank that starts seconds later: programs that take any port, to listen or to connect from, do not get it."""
    with held_ports(3) as ports:
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        with socket.create_server(("", ports[0])), contextlib.closing(listening(ports[1])) as server, socket.socket() as client:
            client.connect(("127.0.0.1", ports[1]))
            accepted, address = server.accept()
            accepted.close()
            assert address[1] == client.getsockname()[1]
        with confined(f"127.0.0.1:{ports[2]}", []), listening(ports[2]):
            assert reaches("127.0.0.1", ports[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))


@pytest.mark.parametrize(
    ("own", "others", "unknown", "problem"),
    [
        ("192.0.2.1", [], "", "192.0.2.1 is not an address of this machine"),
        ("127.0.0.1", ["no.such.machine.invalid:1"], "", "the address of no.such.machine.invalid is not known"),
        ("127.0.0.1", ["198.51.100.7:1"], "the coordinator", "the address of the coordinator is not known"),
    ],
)
def test_whom_nobody_knows_is_not_shut_out(own: str, others: list[str], unknown: str, problem: str) -> None:
    (port,) = free_ports(1, "")
    with (
        pytest.warns(UserWarning, match=f"can read and write files as you: {problem}"),
        confined(f"{own}:{port}", [f"{own}:{port}", *others], unknown=unknown),
    ):
        server = listening(port)
    with server:
        assert comes("127.0.0.1", server)


@pytest.mark.parametrize("who", [[], ORDINARY], ids=["this user", "an ordinary user"])
def test_strangers_stay_out(who: list[str]) -> None:
    """Newer kernels let only administrators filter what comes to a TCP socket. Then strangers go on to come to another socket."""
    if who and os.geteuid():
        pytest.skip("this user is an ordinary one")
    done = subprocess.run([*who, sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "127.0.0.2 True\n127.0.0.3 False\n127.0.0.1 False\n127.0.0.2 True\n"


def test_trusted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trusted_networks() == ()
    monkeypatch.setenv("TFREP_TRUSTED_NETWORKS", "10.0.0.0/8, fd00::/8,192.0.2.1")
    assert [str(each) for each in trusted_networks()] == ["10.0.0.0/8", "fd00::/8", "192.0.2.1/32"]
    for value in ("10.0.0.1/8", "everybody", "10.0.0.0/8,", "::1/200", "9" * 5000):
        monkeypatch.setenv("TFREP_TRUSTED_NETWORKS", value)
        with refuses(TFREP_TRUSTED_NETWORKS=value) as error:
            trusted_networks()
        assert len(str(error.value)) < 1500
