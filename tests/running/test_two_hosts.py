"""Launchers on two machines, for which network namespaces stand (`tests/networks.py`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
from networks import ADDRESS, HOSTS, HOSTS_6, cable_cut, needs_networks, on, two_networks
from test_joining import check_all, found_in, outputs_of
from test_joining import environ as quiet_environ
from test_nodes import SOON, check_ranks, launch, options_of

LIMIT = 200
SCRIPTS = Path(__file__).with_name("scripts")

pytestmark = [pytest.mark.lane("hosts"), needs_networks]


class Network(NamedTuple):
    """Two hosts, and their addresses."""

    names: list[str]
    addresses: list[str]

    @property
    def in_urls(self) -> list[str]:
        """The addresses as they are written before a port."""
        return [f"[{address}]" if ":" in address else address for address in self.addresses]

    @property
    def rendezvous(self) -> str:
        return f"{self.in_urls[0]}:29500"

    @property
    def prefixes(self) -> list[list[str]]:
        return [on(name) for name in self.names]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, which reach only each other."""
    with two_networks() as names:
        yield names


@pytest.fixture(scope="module", params=[HOSTS, HOSTS_6], ids=["IPv4", "IPv6"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Two network namespaces that have addresses of one kind only."""
    with two_networks(request.param) as names:
        yield Network(names, request.param)


@pytest.fixture(scope="module")
def loss_of_one_device() -> list[float]:
    """What the model of `joins.py` loses without a strategy."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.arange(40, dtype="float32").reshape(10, 4) / 40
    loss: list[float] = model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"]
    return loss


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    return {"TFREP_SECRET_FILE": str(file)}


def test_launchers_on_two_hosts(network: Network, secret: dict[str, str], tmp_path: Path) -> None:
    results, ranks = launch(tmp_path, options_of(network.rendezvous, (2, 1)), network.prefixes, **secret)
    assert results == ["ended well"] * 2
    first, second = network.in_urls
    check_ranks(ranks, [first, first, second], 29500)


def test_two_machines_that_say_that_they_are_the_first(hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    twice = [options_of(ADDRESS, (1, 1))[0]] * 2
    results, ranks = launch(tmp_path, twice, [on(host) for host in hosts], seconds=SOON, **secret)
    assert all("Two processes say that they are node 0: " in each for each in results), results
    assert not ranks


def test_a_cut_cable(hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:
    with cable_cut(hosts[0]):
        limit = {"TFREP_RENDEZVOUS_TIMEOUT": "3"}
        results, ranks = launch(tmp_path, options_of(ADDRESS, (1, 1)), [on(host) for host in hosts], **secret, **limit)
    assert "Not all nodes came to the rendezvous within 3 seconds. Node 1 has not come." in results[0]
    assert "Not all nodes came to the rendezvous within 3 seconds. Node 0 cannot be reached" in results[1]
    assert not ranks


@pytest.mark.parametrize("kind", ["nodes", "torchrun"])
def test_training_on_two_hosts(
    kind: str, network: Network, secret: dict[str, str], loss_of_one_device: list[float], tmp_path: Path
) -> None:
    processes = []
    for rank, host in enumerate(network.names):
        own, arguments = quiet_environ(**secret), []
        if kind == "torchrun":
            own |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500"}
        else:
            arguments = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", network.rendezvous]
            arguments += ["--log-dir", str(tmp_path / "logs")]
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *arguments, str(SCRIPTS / "joins.py")]
        processes.append(
            subprocess.Popen(on(host) + command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = outputs_of(processes)
    assert all("cannot reach rank 0" not in error for _, error in outputs)  # Of what tells ranks that another has ended.
    texts = [output for output, _ in outputs] + [log.read_text() for log in tmp_path.glob("logs/rank1.log")]
    found = [each for text in texts for each in found_in(text)]
    check_all(found, "tf")
    np.testing.assert_allclose(found[0]["loss"], loss_of_one_device, rtol=1e-6)
