"""Launchers of several machines that cannot meet: each says so within half a minute, and what to do. None loads TensorFlow."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from test_joining import SCRIPTS, environ

from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("launchers")

SOON = 30
"""Seconds in which a mistake is told."""


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher with some options and variables."""
    with contextlib.ExitStack() as stack:

        def run(*options: str, **variables: str) -> subprocess.Popen[str]:
            started = subprocess.Popen(
                [sys.executable, "-m", "tfrep_strategy.cli", "run", *options, str(SCRIPTS / "shows.py"), "None"],
                cwd=tmp_path, env=environ(XDG_CACHE_HOME=str(tmp_path / "cache")) | variables,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(started)
            stack.callback(started.kill)
            return started

        yield run


def node(address: str, number: int | str, count: int | str = 2) -> list[str]:
    return ["--nnodes", str(count), "--node-rank", str(number), "--rendezvous", address]


def check_refused(launchers: Sequence[subprocess.Popen[str]], said: str, hint: str) -> None:
    deadline = time.monotonic() + SOON
    for each in launchers:
        output, errors = each.communicate(timeout=deadline - time.monotonic())
        assert each.returncode == 2, errors
        assert not output
        assert said in errors
        assert f"Hint: {hint}" in errors


@pytest.mark.parametrize(("numbers", "count"), [((0, 0), 2), ((0, 1, 1), 3)])
def test_a_number_twice(numbers: Sequence[int], count: int, address: str, start: Callable) -> None:
    launchers = [start(*node(address, number, count)) for number in numbers]
    check_refused(launchers, f"Two processes say that they are node {numbers[-1]}: ", "give each process its own node")


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        (["--nnodes", "2", "--rendezvous", "a:1"], "node_rank=None", "give all three on each machine"),
        (["--nnodes", "3:2", "--rendezvous", "a:1"], "nnodes_min=3", "use a whole number, from 1 to 2."),
    ],
)
def test_options_that_cannot_be(options: list[str], said: str, hint: str, start: Callable) -> None:
    check_refused([start(*options)], said, hint)


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2p1\r\n", b""], ids=["talks", "is silent"])
@pytest.mark.parametrize("options", ["2", "1:2"])
def test_a_stranger_at_the_address(options: str, says: bytes, address: str, start: Callable) -> None:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, int(port))))
        elastic = ["--nnodes", options, "--rendezvous", address, "--backup-dir", "backups"]
        launcher = start(*(node(address, 1) if options == "2" else elastic))
        server.settimeout(0.1)
        while launcher.poll() is None:
            with contextlib.suppress(TimeoutError):
                peer = stack.enter_context(server.accept()[0])
                peer.sendall(says)
    check_refused([launcher], "Another program listens at the rendezvous.", "use another port, the same for all processes.")


def test_a_stranger_where_machine_0_listens(address: str, start: Callable) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        said = "Node 0 cannot listen at the rendezvous (Address already in use)."
        check_refused([start(*node(address, 0))], said, "use a free port")


def test_the_secret_is_on_no_command_line_and_in_no_log(address: str, start: Callable, tmp_path: Path) -> None:
    secret = "sesame" * 8
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(secret)
    logs = tmp_path / "logs"
    launchers = [
        start(*node(address, number), "--log-dir", str(logs / str(number)), TFREP_SECRET_FILE=str(file), TFREP_DEBUG="1")
        for number in (0, 1)
    ]
    seen = set[str]()
    while any(each.poll() is None for each in launchers):
        for each in psutil.process_iter(["cmdline"]):
            seen.add(" ".join(each.info["cmdline"] or ()))
    outputs = [each.communicate(timeout=SOON) for each in launchers]
    assert [each.returncode for each in launchers] == [0, 0], outputs
    assert any("cluster" in each or "shows.py" in each for each in seen)
    written = [path.read_text("utf-8") for path in logs.rglob("*") if path.is_file()]
    for text in (secret, secret.encode().hex()):
        assert text not in "\n".join([*seen, *written, *(part for output in outputs for part in output)])


def test_nobody_listens(address: str, start: Callable) -> None:
    """A line every 10 seconds, and an error at the limit."""
    launcher = start(*node(address, 1), TFREP_RENDEZVOUS_TIMEOUT="12")
    _, errors = launcher.communicate(timeout=SOON)
    assert launcher.returncode == 1, errors
    line, error = errors.splitlines()[0], "\n".join(errors.splitlines()[1:])
    assert f"Waiting at {address}. Node 0 cannot be reached ([Errno 111] Connection refused)." in line
    assert "Not all nodes came to the rendezvous within 12 seconds. Node 0 cannot be reached" in error
    assert "Hint: check that all were started, and that they reach this address" in error


@pytest.mark.parametrize(("package", "named"), [("tensorflow", "TensorFlow"), ("keras", "Keras")])
def test_other_versions(package: str, named: str, address: str, start: Callable, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    information = packages / f"{package}-9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    other = {"PYTHONPATH": f"{packages}:{environ()['PYTHONPATH']}"}
    launchers = [start(*node(address, 0)), start(*node(address, 1), **other)]
    check_refused(launchers, f"has {named} 9.9, and node 0", "install the same versions everywhere.")
