"""`tfrep run --hosts`, on two machines that reach each other through ssh."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import needs_horovod
from networks import HOSTS, HOSTS_6, cable_cut, two_networks
from test_joining import ROOT, environ, found_in
from test_two_hosts import SCRIPTS, hosts  # noqa: F401
from two_machines import Machine, know, machines_in, needs_machines

from tfrep_strategy.cluster.hardware import cores_of_ranks

pytestmark = [pytest.mark.lane("hosts"), needs_machines]
LIMIT = 150
SOON = 30
"""Seconds in which a mistake is told."""
BOTH = ",".join(f"{host}:1" for host in HOSTS)
PROGRAM = str(SCRIPTS / "on_hosts.py")
SECRET = "sesame-open"


@pytest.fixture(scope="module")
def machines(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:  # noqa: F811
    with machines_in(hosts, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture
def start(machines: list[Machine]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `tfrep run` on the first machine. When the test ends, no process may be left on either."""
    with contextlib.ExitStack() as stack:

        def run(*arguments: str, python: str = sys.executable, folder: Path | None = None, **own: str) -> subprocess.Popen[str]:
            command = [*machines[0].enter, python, "-m", "tfrep_strategy.cli", "run", *arguments]
            if folder is not None:
                command[command.index(f"--wdns={machines[0].folder}")] = f"--wdns={folder}"
            started = subprocess.Popen(
                command, env=environ(**machines[0].variables) | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(started)
            stack.callback(started.kill)
            return started

        yield run
    wait_for(lambda: not any(machine.pids() for machine in machines), 30)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ended(run: subprocess.Popen[str], seconds: float = LIMIT) -> tuple[int, str, str]:
    output, errors = run.communicate(timeout=seconds)
    return run.returncode, output, errors


def waiting(start: Callable, machines: list[Machine], *arguments: str, **own: str) -> subprocess.Popen[str]:
    """Starts ranks that wait for ever, and returns when all do."""
    folder = machines[0].folder / "own" / "tmp"
    run = start("--hosts", BOTH, *arguments, PROGRAM, "waits", str(folder), **own)
    ready = [machine.file(folder) / f"ready{rank}" for rank, machine in enumerate(machines)]
    wait_for(lambda: all(file.exists() for file in ready) or run.poll() is not None, LIMIT)
    assert run.poll() is None, run.communicate()
    for file in ready:
        file.unlink()
    return run


@pytest.mark.parametrize("first", ["here", "there"])
@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod)])
def test_ranks_are_those_of_one_run(communicator: str, first: str, start: Callable, machines: list[Machine]) -> None:
    order = [0, 1] if first == "here" else [1, 0]
    where = ",".join(f"{HOSTS[each]}:{places}" for each, places in zip(order, (1, 2), strict=True))
    cores = sorted(os.sched_getaffinity(0))
    binds = len(cores) > 1
    options = ["--prefix", "--communicator", communicator, "--export", "MY_TOKEN", *["--bind-cores"] * binds]
    own = {"MY_TOKEN": SECRET, "MY_OTHER": SECRET, "SSH_CONNECTION": "203.0.113.9 51000 198.51.100.7 22"}  # The user's own session.
    code, output, errors = ended(start("--hosts", where, *options, PROGRAM, "tells", **own))
    assert code == 0, errors
    found = found_in(output)
    assert len(found) == 3
    names = [machines[each].name for each in order]
    for each in found:
        assert each["ranks"] == [0, 1, 2]
        assert each["hosts"] == [names[0], names[1], names[1]]
        assert each["folder"] == str(machines[0].folder)
        assert each["token"] == SECRET
    of_ranks = [cores, *map(sorted, cores_of_ranks(2))] if binds else [cores] * 3  # One rank has a machine for itself.
    assert sorted(each["cores"] for each in found) == sorted(of_ranks)
    assert [each["other"] for each in found].count(None) == (2 if first == "here" else 1)  # It was not exported.
    assert sorted(re.findall(r"^\[(\d)\] FOUND", output, re.MULTILINE)) == ["0", "1", "2"]


@pytest.mark.parametrize("first", [0, 1])
def test_hosts_that_have_ipv6_only(first: int, tmp_path: Path) -> None:
    """Their names lead to their addresses; the launchers and ranks meet there."""
    with two_networks(HOSTS_6) as names, machines_in(names, tmp_path, HOSTS_6) as made:
        where = f"{names[first]}:1,{names[1 - first]}:1"
        run = [sys.executable, "-m", "tfrep_strategy.cli", "run", "--hosts", where, "--prefix", PROGRAM, "tells"]
        done = subprocess.run(
            [*made[0].enter, *run], env=environ(**made[0].variables, MY_TOKEN=SECRET),
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = found_in(done.stdout)
        assert [each["ranks"] for each in found] == [[0, 1]] * 2
        assert sorted(each["hosts"] for each in found) == [[names[first], names[1 - first]]] * 2


def test_a_rank_on_the_other_host_fails(start: Callable) -> None:
    code, output, errors = ended(start("--hosts", BOTH, PROGRAM, "fails"))
    assert code == 7
    assert output == "I am rank 0\n"
    last = f"tfrep: On {HOSTS[1]}: Rank 1 failed with exit code 7; all ranks were ended. Its last lines:\n"
    assert re.search(rf"{re.escape(last)}(  .*\n)*  I am rank 1\n(  .*\n)*Logs: ", errors), errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_launcher_is_ended(number: signal.Signals, start: Callable, machines: list[Machine]) -> None:
    run = waiting(start, machines, "--export", "MY_TOKEN", MY_TOKEN=SECRET)
    told = [line for machine in machines for line in machine.command_lines()]
    assert sum("on_hosts.py" in line for line in told) >= 3  # The ranks, and the launcher.
    assert SECRET not in str(told)
    assert not re.search(r"\b[0-9a-f]{32,}\b", str(told))  # The secret of the meeting, and the mark of messages.
    ranks = [pid for pid in machines[1].pids() if SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    assert ranks
    run.send_signal(number)
    wait_for(lambda: not any(machine.pids() for machine in machines), 15)
    code, _, errors = ended(run)
    if number == signal.SIGTERM:
        assert code in (-number, 128 + number), errors
    else:
        assert code == -number


def test_a_launcher_on_a_host_is_killed(start: Callable, machines: list[Machine]) -> None:
    run = waiting(start, machines)
    [agent] = [pid for pid in machines[1].pids() if b"running.on_host" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2]]
    os.kill(agent, signal.SIGKILL)
    code, _, errors = ended(run, 40)
    assert code != 0
    assert f"{HOSTS[1]} was lost" in errors


def test_a_host_stands_still(start: Callable, machines: list[Machine]) -> None:
    """Its kernel still answers, as in a container that is paused. When it goes on, it ends its ranks."""
    run = waiting(start, machines, TFREP_TIMEOUT="5")
    stopped = [pid for pid in machines[1].pids() if b"sshd" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        code, _, errors = ended(run, 40)
        assert time.monotonic() - began < 20
        assert code != 0
        assert f"{HOSTS[1]} was lost (nothing has come from it for " in errors
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not set(stopped) & set(machines[1].pids()), 20)


def test_a_cable_is_cut(start: Callable, machines: list[Machine]) -> None:
    run = waiting(start, machines)
    with cable_cut(machines[0].name):
        deadline = time.monotonic() + 60
        code, _, errors = ended(run, 60)
        assert code != 0
        assert f"{HOSTS[1]} was lost" in errors
        assert not machines[0].pids()
        wait_for(lambda: not machines[1].pids(), deadline - time.monotonic())


def test_a_slow_cable(start: Callable, machines: list[Machine]) -> None:
    shape = ["tc", "-n", machines[0].name, "qdisc", "add", "dev", "cable", "root", "tbf", "rate", "1mbit", "burst", "16kb"]
    made = subprocess.run([*shape, "latency", "400ms"], capture_output=True, text=True, check=False)
    if "qdisc kind is unknown" in made.stderr:
        pytest.skip("the kernel has no module to make a cable slow (sch_tbf)")
    assert made.returncode == 0, made.stderr
    try:
        code, output, errors = ended(start("--hosts", BOTH, PROGRAM, "tells"))
    finally:
        subprocess.run(["tc", "-n", machines[0].name, "qdisc", "delete", "dev", "cable", "root"], check=True)
    assert code == 0, errors
    [found] = found_in(output)
    assert found["ranks"] == [0, 1]


def no_such_host(machines: list[Machine], there: Path) -> dict[str, object]:
    return {"hosts": f"{HOSTS[0]}:1,10.77.0.77:1"}


def another_key(machines: list[Machine], there: Path) -> dict[str, object]:
    know(machines[0].folder, [machines[0].name] * 2)
    return {}


def no_key(machines: list[Machine], there: Path) -> dict[str, object]:
    (machines[0].folder / "known_hosts").write_text("")
    return {}


def no_permission(machines: list[Machine], there: Path) -> dict[str, object]:
    return {"TFREP_SSH": machines[0].variables["TFREP_SSH"] + " -o User=nobody"}


def no_folder(machines: list[Machine], there: Path) -> dict[str, object]:
    return {"folder": there}


def no_interpreter(machines: list[Machine], there: Path) -> dict[str, object]:
    python = machines[0].file(there) / "python"
    python.symlink_to(sys.executable)
    paths = os.pathsep.join([ROOT, *(path for path in sys.path if path)])
    return {"python": str(there / "python"), "PYTHONPATH": paths}


def no_ssh(machines: list[Machine], there: Path) -> dict[str, object]:
    return {"TFREP_SSH": "no-such-ssh"}


UNREACHABLE = r"10\.77\.0\.\d+ cannot be reached through ssh "
KEY = UNREACHABLE + r"\(Host key verification failed\.\).*\nHint: ~/\.ssh/known_hosts has no key of it"
MISTAKES: dict[Callable[..., dict[str, object]], str] = {
    no_such_host: UNREACHABLE + r"\(.*\)\. .*\nHint: check the name, that the host is on, and that `ssh -F",
    another_key: KEY,
    no_key: KEY,
    no_permission: UNREACHABLE + r"\(.*Permission denied.*\nHint: no password is asked for here\.",
    no_folder: r"10\.77\.0\.2: The working folder cannot be entered .*folder='.*there'\nHint: have the program in the same",
    no_interpreter: r"10\.77\.0\.2 has no Python where this machine .*interpreter='.*there/python'\nHint: install the same",
    no_ssh: r"Cannot start no-such-ssh \(No such file or directory\)\..*\nHint: install OpenSSH's client, or set TFREP_SSH",
}


@pytest.mark.parametrize("mistake", list(MISTAKES), ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_told_soon(mistake: Callable[..., dict[str, object]], start: Callable, machines: list[Machine]) -> None:
    there = machines[0].folder / "own" / "there"
    machines[0].file(there).mkdir()
    given = mistake(machines, there)
    try:
        started = time.monotonic()
        code, output, errors = ended(start("--hosts", str(given.pop("hosts", BOTH)), PROGRAM, "tells", **given))
        assert time.monotonic() - started < SOON
    finally:
        shutil.rmtree(machines[0].file(there))
        know(machines[0].folder, [machine.name for machine in machines])
    assert code == 2, errors
    assert not output
    assert re.search(MISTAKES[mistake], errors), errors
