"""Strangers send garbage to every port of a run that is starting, and of one that trains. It ends well."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from needs import needs_closed_horovod
from networks import HOSTS, ip, needs_networks, on
from strangers import attack, flood, garbage, many_files
from test_open_doors import KINDS, LIMIT, READY, STRANGER, TFREP, WAITS, named, running, wait_for
from test_two_hosts import SCRIPTS, hosts  # noqa: F401

from tfrep_strategy.cluster.horovod.gloo import on_this_machine
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("faults")

MEETING = [
    *TFREP, "run", "--nnodes", "1:2", "--rendezvous", "MEETING_PLACE", "-n", "2",
    "--communicator", "tf", "--backup-dir", "backups", WAITS, "FOLDER",
]  # fmt: skip
"""Its launcher waits for others as long as it runs."""


def ports_of(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found |= {port.laddr.port for port in each.net_connections("tcp") if port.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.parametrize("kind", ["tf", pytest.param("horovod", marks=needs_closed_horovod), "servers", "meeting"])
def test_garbage_on_every_port(kind: str, tmp_path: Path) -> None:
    loaded, sent, starting = tmp_path / "loaded", garbage(tmp_path / "loaded"), set[int]()
    places = {"FOLDER": str(tmp_path), "MEETING_PLACE": f"127.0.0.1:{free_ports(1)[0]}"}
    command = [places.get(each, each) for each in KINDS.get(kind, MEETING)]
    with contextlib.ExitStack() as stack, running([sys.executable, *command], tmp_path) as process:
        stack.enter_context(many_files())

        def is_ready() -> bool:
            for port in ports_of(process.pid) - starting:
                starting.add(port)
                attack(stack, port, sent)
            return len(list(tmp_path.glob("ready*"))) == READY.get(kind, 2)

        wait_for(is_ready, process)
        ports = ports_of(process.pid)
        for port in ports:
            attack(stack, port, sent)
        (tmp_path / "go").touch()
        output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    assert ports
    assert not loaded.exists()


@needs_closed_horovod
def test_strangers_before_a_rank_of_horovod(tmp_path: Path) -> None:
    """They connect to each pair that still waits for its peer, with garbage and without a word, and do not stop."""
    size, sent = 4, garbage(tmp_path / "loaded")
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(on_this_machine(size))
        ranks = []

        def start(rank: int) -> subprocess.Popen[str]:
            own = variables[rank] | {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
            ranks.append(stack.enter_context(running([sys.executable, str(SCRIPTS / "adds.py")], tmp_path, **own)))
            return ranks[-1]

        for rank in range(size - 1):
            start(rank)
        for each in ranks:
            wait_for(lambda pid=each.pid: len(ports_of(pid)) == 1, each)  # That for the last rank.
        ports = {int(variables[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]), *(port for each in ranks for port in ports_of(each.pid))}
        stack.enter_context(many_files())
        assert len(ports) == size
        for port in ports:
            attack(stack, port, sent)
        with flood(ports):
            start(size - 1)
            outputs = [each.communicate(timeout=LIMIT)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * size, outputs
    assert all("SUM 6 " in output for output in outputs), outputs
    assert not (tmp_path / "loaded").exists()


@needs_networks
def test_strangers_on_another_machine(hosts: list[str], tmp_path: Path) -> None:  # noqa: F811
    """They send garbage to the port of rank 0, from the address of rank 1 and from another, while ranks meet."""
    (port,) = free_ports(1)
    addresses = [f"{host}:{port}" for host in HOSTS]
    ip("-n", hosts[1], "address", "replace", f"{STRANGER}/24", "dev", "cable")
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            task = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
            command = [*named(host, HOSTS[rank], tmp_path), sys.executable, *TFREP, "run", WAITS, str(tmp_path)]
            processes.append(stack.enter_context(running(command, tmp_path, TF_CONFIG=task)))
            if rank == 0:
                wait_for(lambda: port in ports_on(hosts[0]), processes[0])
                strangers = [*on(hosts[1]), sys.executable, str(Path(__file__).with_name("strangers.py"))]
                strangers += [str(tmp_path / "loaded"), HOSTS[0], str(port), HOSTS[1], STRANGER]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                attackers = stack.enter_context(subprocess.Popen(strangers, **pipes))  # type: ignore[call-overload]
                assert attackers.stdout.readline() == b"done\n"
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2, processes[0])
        (tmp_path / "go").touch()
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
        attackers.stdin.close()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert not (tmp_path / "loaded").exists()


def ports_on(host: str) -> set[int]:
    """Returns the ports on which programs in a network namespace listen."""
    listed = subprocess.run([*on(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
