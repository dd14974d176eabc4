"""Two network namespaces, joined by a cable, stand for two machines. This needs root, and the command ip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_joining import check_all, found_in, outputs_of
from test_joining import environ as quiet_environ
from test_nodes import check_ranks, launch, options_of

LIMIT = 200
HOSTS = ["10.77.0.1", "10.77.0.2"]
ADDRESS = f"{HOSTS[0]}:29500"
SCRIPTS = Path(__file__).with_name("scripts")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and the command ip"
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, which reach only each other."""
    names = [f"tfrep-{uuid.uuid4().hex[:8]}" for _ in HOSTS]
    made = [subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False) for name in names]
    try:
        if any(each.returncode for each in made):
            pytest.skip(f"network namespaces cannot be made here: {made[0].stderr.decode()}")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def on(host: str) -> list[str]:
    return ["ip", "netns", "exec", host]


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    return {"TFREP_SECRET_FILE": str(file)}


def test_launchers_on_two_hosts(hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    results, ranks = launch(tmp_path, options_of(ADDRESS, (2, 1)), [on(host) for host in hosts], **secret)
    assert results == ["ended well"] * 2
    check_ranks(ranks, [HOSTS[0], HOSTS[0], HOSTS[1]], 29500)


def test_two_machines_that_say_that_they_are_the_first(hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    twice = [options_of(ADDRESS, (1, 1))[0]] * 2
    results, ranks = launch(tmp_path, twice, [on(host) for host in hosts], **secret)
    assert all("Two processes say that they are node 0: " in each for each in results), results
    assert not ranks


def test_a_cut_cable(hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    ip("-n", hosts[0], "link", "set", "cable", "down")
    limit = {"TFREP_RENDEZVOUS_TIMEOUT": "3"}
    try:
        results, ranks = launch(tmp_path, options_of(ADDRESS, (1, 1)), [on(host) for host in hosts], **secret, **limit)
    finally:
        ip("-n", hosts[0], "link", "set", "cable", "up")
    assert "The nodes did not meet within 3 seconds. Node 1 has not come." in results[0]
    assert "The nodes did not meet within 3 seconds. Node 0 cannot be reached" in results[1]
    assert not ranks


@pytest.mark.parametrize("kind", ["nodes", "torchrun"])
def test_training_on_two_hosts(kind: str, hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    processes = []
    for rank, host in enumerate(hosts):
        own, arguments = quiet_environ(**secret), []
        if kind == "torchrun":
            own |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29500"}
        else:
            arguments = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", ADDRESS]
            arguments += ["--log-dir", str(tmp_path / "logs")]
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *arguments, str(SCRIPTS / "joins.py")]
        processes.append(
            subprocess.Popen(on(host) + command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = outputs_of(processes)
    assert all("cannot reach rank 0" not in error for _, error in outputs)  # Of what tells ranks that another has ended.
    texts = [output for output, _ in outputs] + [log.read_text() for log in tmp_path.glob("logs/rank1.log")]
    check_all([each for text in texts for each in found_in(text)], "tf")
