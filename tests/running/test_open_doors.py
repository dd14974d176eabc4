"""On which ports the processes of a run listen, and which of them take a connection from another machine: a network namespace."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from needs import needs_horovod
from networks import HOSTS, ORDINARY, ip, on
from test_joining import environ as quiet_environ
from test_two_hosts import SCRIPTS, hosts, pytestmark  # noqa: F401

LIMIT = 150
STRANGER = "10.77.0.9"
WAITS = str(SCRIPTS / "waits.py")
TFREP = ["-m", "tfrep_strategy.cli"]
KINDS = {
    "auto": [*TFREP, "run", "-n", "2", WAITS, "FOLDER"],
    "tf": [*TFREP, "run", "-n", "2", "--communicator", "tf", WAITS, "FOLDER"],
    "horovod": [*TFREP, "run", "-n", "2", "--communicator", "horovod", WAITS, "FOLDER"],
    "shared_memory": [*TFREP, "run", "-n", "2", "--communicator", "shared_memory", WAITS, "FOLDER"],
    "mirrored": [*TFREP, "run", "-n", "2", "--strategy", "mirrored", WAITS, "FOLDER"],
    "hosts": [*TFREP, "run", "--hosts", "localhost:2", "--communicator", "tf", WAITS, "FOLDER"],
    "launch": [WAITS, "FOLDER", "launch"],
    "another launcher": [WAITS, "FOLDER", "launcher"],
    "servers": [*TFREP, "run", "--strategy", "parameter-server", "--workers", "1", "--servers", "1", WAITS, "FOLDER"],
    "cluster": [WAITS, "FOLDER", "cluster"],
    "elastic": [
        *(*TFREP, "run", "--nnodes", "1:2", "--rendezvous", "localhost:29500", "-n", "2", "--backup-dir", "backups"),
        *("--communicator", "tf", WAITS, "FOLDER"),
    ],
}
READY = {"mirrored": 1, "servers": 1, "cluster": 1}
"""How many processes train; two, if it is not said."""
SERVERS = {"tf": 2, "hosts": 2, "launch": 2, "another launcher": 2, "servers": 3, "cluster": 3, "elastic": 2}
"""How many servers listen on all interfaces, since TensorFlow knows nothing else."""


class Machines:
    """Two machines, the first of which runs something, and the second tries its ports."""

    def __init__(self, stack: contextlib.ExitStack, names: Sequence[str], *source: str) -> None:
        self._ask_list = _asking(stack, [*on(names[0]), sys.executable, str(SCRIPTS / "looks.py"), "list"])
        self._ask_try = _asking(stack, [*on(names[1]), sys.executable, str(SCRIPTS / "looks.py"), "try", HOSTS[0], *source])
        self._open = self._ask_list(None)

    def look(self, pid: int) -> tuple[dict[int, str], list[int]]:
        """Returns the ports of a process and its children, and those of them that are open to the second machine."""
        ports = {int(port): where for port, where in self._ask_list(pid).items()}
        taken = self._ask_try([*ports, self._open])
        assert self._open in taken  # The machines reach each other.
        return ports, [port for port in taken if port != self._open]


@pytest.fixture
def machines(hosts: list[str]) -> Iterator[Machines]:  # noqa: F811
    with contextlib.ExitStack() as stack:
        yield Machines(stack, hosts)


@pytest.mark.parametrize(
    ("kind", "user"),
    [
        ("tf", "root"),
        ("tf", "ordinary"),
        pytest.param("horovod", "ordinary", marks=needs_horovod),
        *((kind, "ordinary") for kind in ("auto", "shared_memory", "mirrored", "hosts", "launch")),
        *((kind, "ordinary") for kind in ("another launcher", "servers", "cluster", "elastic")),
    ],
)
def test_a_run_on_one_machine(kind: str, user: str, machines: Machines, hosts: list[str], tmp_path: Path) -> None:  # noqa: F811
    command = [str(tmp_path) if each == "FOLDER" else each for each in KINDS[kind]]
    prefix = on(hosts[0]) + (ORDINARY if user == "ordinary" else [])
    own = {"MY_TOKEN": "sesame", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with running([*prefix, sys.executable, *command], tmp_path, **own) as process:
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == READY.get(kind, 2), process)
        ports, taken = machines.look(process.pid)
        started = psutil.Process(process.pid).children(recursive=True)
        told = [each.cmdline() for each in started]
        (tmp_path / "go").touch()
        output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    assert "Any program that reaches the ports" not in output
    assert not taken, ports
    assert len(told) >= 2
    assert "sesame" not in str(told) + output  # Every user of a machine reads command lines.
    everywhere = [where for where in ports.values() if where.split()[1] in ("::", "0.0.0.0")]
    assert len(everywhere) == SERVERS.get(kind, 0), ports
    assert kind not in ("shared_memory", "mirrored") or not ports


@pytest.mark.parametrize("kind", ["tf", "servers"])
def test_a_run_that_starts(kind: str, machines: Machines, hosts: list[str], tmp_path: Path) -> None:  # noqa: F811
    """A stranger who tries all ports all the time comes through none, not even while TensorFlow starts its servers."""
    command = [str(tmp_path) if each == "FOLDER" else each for each in KINDS[kind]]
    seen: dict[int, str] = {}
    with running([*on(hosts[0]), sys.executable, *command], tmp_path) as process:
        deadline = time.monotonic() + LIMIT
        all_listen = False
        while not all_listen and process.poll() is None and time.monotonic() < deadline:
            all_listen = len(list(tmp_path.glob("ready*"))) == READY.get(kind, 2)
            ports, taken = machines.look(process.pid)
            seen |= ports
            assert not taken, ports
        (tmp_path / "go").touch()
        output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    assert len([where for where in seen.values() if where.split()[1] in ("::", "0.0.0.0")]) == SERVERS[kind], seen


@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod)])
def test_a_run_on_two_machines(communicator: str, hosts: list[str], tmp_path: Path) -> None:  # noqa: F811
    """Nobody comes from another address, such as a second one of the second machine, which stands for a third."""
    ip("-n", hosts[1], "address", "replace", f"{STRANGER}/24", "dev", "cable")
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with contextlib.ExitStack() as stack:
        machines, processes = Machines(stack, hosts, STRANGER), []
        for rank, host in enumerate(hosts):
            node = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", f"{HOSTS[0]}:29500"]
            node += ["--communicator", communicator]
            command = [*named(host, HOSTS[rank], tmp_path), sys.executable, *TFREP, "run", *node, WAITS, str(tmp_path)]
            processes.append(stack.enter_context(running(command, tmp_path, TFREP_SECRET_FILE=str(secret))))
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2, processes[0])
        ports, taken = machines.look(processes[0].pid)
        (tmp_path / "go").touch()
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "Any program that reaches the ports" not in outputs[0]
    assert len(ports) == 1, ports
    assert not taken


def test_doctor(machines: Machines, hosts: list[str], tmp_path: Path) -> None:  # noqa: F811
    """Its processes are there for seconds only. The last attempt at each port counts."""
    last: dict[int, bool] = {}
    with running([*on(hosts[0]), sys.executable, *TFREP, "doctor", "--json"], tmp_path) as process:
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            ports, taken = machines.look(process.pid)
            last |= {port: port in taken for port in ports}
        output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    assert len(last) >= 2, output
    assert not any(last.values()), last


def named(host: str, address: str, folder: Path) -> list[str]:
    """What gives a process on a host a host name of its own, which leads to the address."""
    names = folder / f"{host}.names"
    names.write_text(f"127.0.0.1 localhost\n{address} {host}\n")
    own = f'hostname {host}; mount --bind {names} /etc/hosts; exec "$@"'
    return [*on(host), "unshare", "--uts", "--mount", "sh", "-c", own, "sh"]


@contextlib.contextmanager
def running(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=folder, env=quiet_environ(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _asking(stack: contextlib.ExitStack, command: list[str]) -> Callable[[Any], Any]:
    """Starts a program that answers lines; without a question, it returns the line with which it begins."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    stack.callback(process.communicate)

    def ask(question: Any) -> Any:
        if question is not None:
            print(json.dumps(question), file=process.stdin)
        return json.loads(process.stdout.readline())  # type: ignore[union-attr]

    return ask
