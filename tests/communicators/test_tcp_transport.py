"""A transport of others, over TCP: an installed package names it, and two ranks train over it what one device trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from communicators.test_defaults import check, own_and_default

from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("wires")

_SCRIPTS = Path(__file__).parent / "scripts"


def through_tcp(strategy: Any, scripts: str, address: str) -> None:
    sys.path.insert(0, scripts)
    from tcp_transport import TcpCommunicator

    environment = strategy.extended.environment
    own = TcpCommunicator(_At(environment, address))
    check(own_and_default(own), own.size)
    strategy.communicator.barrier()


class _At:
    """An environment whose rank 0 has another address."""

    def __init__(self, environment: Any, address: str) -> None:
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self.addresses = [address] * self.size


def test_it_gives_what_the_defaults_give(worker_pool: Any) -> None:
    worker_pool("tf", 2).run(through_tcp, str(_SCRIPTS), f"127.0.0.1:{free_ports(1)[0]}")


def test_two_ranks_train_what_one_device_trains(tmp_path: Path) -> None:
    site = tmp_path / "site"
    about = site / "tcp_transport-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(_SCRIPTS / "tcp_transport.py", site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tcp-transport\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text("[tfrep_strategy.communicators]\ntcp = tcp_transport:TcpCommunicator\n", "utf-8")
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    environ = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}

    def losses(*command: str) -> list[float]:
        script = str(_SCRIPTS / "fits_digits.py")
        done = subprocess.run(
            [sys.executable, *command, script], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: list[float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
        return found

    ranks = losses("-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", "tcp", "--log-dir", "logs")
    np.testing.assert_allclose(ranks, losses(), rtol=1e-5)
