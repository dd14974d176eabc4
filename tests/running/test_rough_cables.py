"""Two machines whose cable delays packets and loses some: nobody is called lost, and the answer is that of one device."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from needs import needs_horovod
from networks import ADDRESS, HOSTS, HOSTS_6, on, two_networks
from rough_cable import rough_cable
from test_hosts import BOTH, LIMIT, ended, machines, start, wait_for  # noqa: F401
from test_joining import SCRIPTS, environ, found_in, outputs_of
from test_nodes import check_ranks, launch, options_of
from test_two_hosts import hosts, secret  # noqa: F401
from two_machines import Machine, needs_machines

from tfrep_strategy.cluster.notices import Progress, Step

pytestmark = [pytest.mark.lane("hosts"), needs_machines]
PROGRAM = str(SCRIPTS / "goes_slowly.py")
OUT_SECONDS = 8
IMPATIENT = {"TFREP_TIMEOUT": "10"}
"""What a user may set who wants to hear of a lost machine soon."""


@pytest.fixture(scope="module")
def weights() -> list[float]:
    """What one device learns in two epochs."""
    command = [sys.executable, PROGRAM, "2", "0"]
    alone = subprocess.run(command, env=environ(), capture_output=True, text=True, check=True, timeout=LIMIT)
    [found] = found_in(alone.stdout)
    return found["weights"]  # type: ignore[return-value]


def check(output: str, errors: str, weights: list[float]) -> None:
    [found] = found_in(output)
    assert found["replicas"] == 2
    np.testing.assert_allclose(found["weights"], weights, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    assert "lost" not in errors
    assert "started again" not in errors


@pytest.mark.parametrize("addresses", [HOSTS, HOSTS_6], ids=["IPv4", "IPv6"])
def test_packets_are_delayed_and_lost(addresses: list[str]) -> None:
    def sends(number: int, what: str) -> list[str]:
        return [*on(names[number]), sys.executable, "-S", str(SCRIPTS / "sends.py"), what, addresses[0]]

    with (
        two_networks(addresses) as names,
        rough_cable(names, addresses, seconds=0.05, loss=0.1) as cable,
        subprocess.Popen(sends(0, "listens"), stdout=subprocess.PIPE, text=True) as listening,
    ):
        assert listening.stdout is not None
        assert listening.stdout.readline() == "ready\n"
        called = subprocess.run(sends(1, "calls"), capture_output=True, text=True, check=True, timeout=LIMIT)
        assert listening.communicate(timeout=LIMIT)[0] == "200000\n"
    assert float(called.stdout) > 0.1
    assert cable.lost > 0.02 * cable.carried > 0


@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod)])
def test_training_on_hosts_that_ssh_reaches(
    communicator: str,
    start: Callable,  # noqa: F811
    machines: list[Machine],  # noqa: F811
    weights: list[float],
) -> None:
    with rough_cable([machine.name for machine in machines]) as cable:
        code, output, errors = ended(start("--hosts", BOTH, "--communicator", communicator, PROGRAM, "2", "0", **IMPATIENT))
    assert code == 0, errors
    check(output, errors, weights)
    assert cable.lost > 10


@pytest.mark.parametrize("seconds", [0.05, 0.7])
def test_launchers_meet(seconds: float, hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    with rough_cable(hosts, seconds=seconds, loss=0.1):
        results, ranks = launch(tmp_path, options_of(ADDRESS, (1, 1)), [on(host) for host in hosts], **secret)
    assert results == ["ended well"] * 2
    check_ranks(ranks, HOSTS, 29500)


def test_ranks_meet(hosts: list[str], secret: dict[str, str], weights: list[float], tmp_path: Path) -> None:  # noqa: F811
    """As torchrun and many schedulers start them."""
    processes = []
    with rough_cable(hosts):
        for rank, host in enumerate(hosts):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29500"}
            command = [*on(host), sys.executable, "-m", "tfrep_strategy.cli", "run", PROGRAM, "2", "0"]
            variables = environ(**secret, **own, **IMPATIENT)
            processes.append(
                subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = outputs_of(processes)
    check("".join(output for output, _ in outputs), "".join(error for _, error in outputs), weights)


def test_a_cable_that_is_out_for_some_seconds(
    start: Callable,  # noqa: F811
    machines: list[Machine],  # noqa: F811
    weights: list[float],
    tmp_path: Path,
) -> None:
    backups = tmp_path / "backups"
    with rough_cable([machine.name for machine in machines]) as cable:
        options = ["--hosts", BOTH, "--max-restarts", "1", "--backup-dir", str(backups)]
        run = start(*options, PROGRAM, "2", "0.3", TFREP_BACKUP_SECONDS="600")
        progress = Progress(backups)
        wait_for(lambda: (progress.read() or Step(0, 0, 0)) >= Step(0, 0, 3) or run.poll() is not None, LIMIT)
        before, cable.loss = cable.carried, 1.0
        time.sleep(OUT_SECONDS)
        cable.loss = 0.02
        code, output, errors = ended(run)
    assert code == 0, errors
    assert cable.carried > before
    check(output, errors, weights)


def test_an_elastic_run_goes_on_when_the_cable_was_out(
    hosts: list[str],  # noqa: F811
    secret: dict[str, str],  # noqa: F811
    weights: list[float],
    tmp_path: Path,
) -> None:
    backups = tmp_path / "backups"
    own = environ(**secret, TFREP_BACKUP_SECONDS="600", TMPDIR=str(tmp_path))
    processes = []
    with rough_cable(hosts) as cable:
        for number, host in enumerate(hosts):
            options = ["--nnodes", "1:2", "--rendezvous", ADDRESS, "--communicator", "tf", "--backup-dir", str(backups)]
            options += ["--log-dir", str(tmp_path / f"logs{number}")]
            command = [*on(host), sys.executable, "-m", "tfrep_strategy.cli", "run", *options, PROGRAM, "2", "0.3"]
            processes.append(
                subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        progress = Progress(backups)
        wait_for(lambda: (progress.read() or Step(0, 0, 0)) >= Step(0, 0, 3) or processes[0].poll() is not None, LIMIT)
        cable.loss = 1.0
        time.sleep(OUT_SECONDS)
        cable.loss = 0.02
        outputs = outputs_of(processes)
    check(outputs[0][0], "".join(error for _, error in outputs), weights)
