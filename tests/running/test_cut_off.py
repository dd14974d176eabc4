"""Runs on two machines whose cable is cut: of an elastic one, one goes on; of others, both say whom they miss."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from networks import ADDRESS, HOSTS, cable_cut, ip, on
from test_elastic_runs import wait_for
from test_joining import SCRIPTS, environ, found_in
from test_two_hosts import hosts, pytestmark, secret  # noqa: F401

from tfrep_strategy.cluster.notices import Progress, Step

LIMIT = 200
SOON = 60
"""Seconds after which a machine that is silent is named, and nobody waits for it."""
SCRIPT = str(SCRIPTS / "goes_slowly.py")
TFREP_RUN = [sys.executable, "-m", "tfrep_strategy.cli", "run"]


@pytest.mark.parametrize("cut_off", ["for ever", "for some time"])
def test_a_cut_cable(cut_off: str, hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    backups = tmp_path / "backups"
    own = environ(**secret, TFREP_BACKUP_SECONDS="0", TMPDIR=str(tmp_path))

    def start(number: int) -> subprocess.Popen[str]:
        options = ["--nnodes", "1:2", "--rendezvous", ADDRESS, "--communicator", "tf", "--backup-dir", str(backups)]
        options += ["--log-dir", str(tmp_path / f"logs{number}")]
        command = [*on(hosts[number]), *TFREP_RUN, *options, SCRIPT, "6", "0.3"]
        return subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    progress = Progress(backups)
    both = [start(0), start(1)]
    try:
        wait_for(progress, Step(0, 1, 2), both[0])
        ip("-n", hosts[0], "link", "set", "cable", "down")
        _, said = both[1].communicate(timeout=LIMIT)
        assert both[1].returncode == 1
        assert "Machine 0, with the rendezvous of the run, was lost." in said
        assert ADDRESS in said
        if cut_off == "for some time":
            wait_for(progress, Step(0, 1, 3), both[0])
            ip("-n", hosts[0], "link", "set", "cable", "up")
            both.append(start(1))
        output, said = both[0].communicate(timeout=LIMIT)
    finally:
        ip("-n", hosts[0], "link", "set", "cable", "up")
        for each in both:
            each.terminate()
            each.communicate()
    assert both[0].returncode == 0, said
    command = [sys.executable, SCRIPT, "6", "0"]
    alone = subprocess.run(command, env=environ(), capture_output=True, text=True, check=True, timeout=LIMIT)
    [found], [expected] = found_in(output), found_in(alone.stdout)
    assert " was lost. All ranks are started again." in said
    assert found["replicas"] == (1 if cut_off == "for ever" else 2)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nodes", "torchrun"])
def test_whom_ranks_miss(kind: str, hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Nothing is started again here. With variables as torchrun sets them, no launcher of ours takes part."""
    ready, both = [tmp_path / f"ready{rank}" for rank in range(2)], []
    with contextlib.ExitStack() as stack:
        for rank, host in enumerate(hosts):
            own, arguments = environ(**secret), list[str]()
            if kind == "torchrun":
                own |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29500"}
            else:
                arguments = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", ADDRESS]
                arguments += ["--log-dir", str(tmp_path / f"logs{rank}")]
            command = [*on(host), *TFREP_RUN, *arguments, str(SCRIPTS / "on_hosts.py"), "waits", str(tmp_path)]
            both.append(subprocess.Popen(command, cwd=tmp_path, env=own, stderr=subprocess.PIPE, text=True))
            stack.callback(both[-1].communicate)
            stack.callback(both[-1].terminate)
        deadline = time.monotonic() + LIMIT
        while not all(file.exists() for file in ready):
            assert time.monotonic() < deadline
            assert all(each.poll() is None for each in both)
            time.sleep(0.1)
        with cable_cut(hosts[0]):
            deadline = time.monotonic() + SOON
            said = [each.communicate(timeout=max(0.0, deadline - time.monotonic()))[1] for each in both]
    assert [each.returncode for each in both] == [1, 1], said
    assert "Rank 1 ended without a word." in said[0]
    assert "Rank 0 ended without a word." in said[1]
