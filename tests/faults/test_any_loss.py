"""Faults that are drawn at random, from outside, one after the other: runs end as one that nobody disturbed.

`TFREP_FAULTS` says how many there are, 6 by default, and `TFREP_FAULTS_SEED` which.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kills import killed_run
from disturbed import SCRIPT, Kind, Run, environ, found_in, kinds_on_hosts
from injecting import FAULTS, OF_HOSTS, ON_HOSTS, START_SECONDS, Table, drawn, finish, inject
from networks import needs_networks, two_networks

from tfrep_strategy.cluster.hardware import SHARES_MEMORY
from tfrep_strategy.cluster.identity import horovod_is_installed

MANY = int(os.environ.get("TFREP_FAULTS", "6"))
SEED = int(os.environ.get("TFREP_FAULTS_SEED", "0"))
MANY_ON_HOSTS = MANY // 3
FAULTS_OF_A_RUN = 5
COMMUNICATORS = ["tf", "horovod"] if horovod_is_installed() else ["tf"]
ON_ONE_MACHINE = ["shared_memory"] if SHARES_MEMORY else []
pytestmark = [pytest.mark.lane("faults"), pytest.mark.timeout(400 + 100 * MANY)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one device learns."""
    folder = tmp_path_factory.mktemp("alone")
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=folder, env=environ(), capture_output=True, text=True, timeout=START_SECONDS
    )
    return found_in(alone.stdout)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk for backups; a folder where none can be mounted, which is never full then."""
    folder = tmp_path / "backups"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


class Drawing:
    """Faults into runs of several kinds in turns, each of which is compared with one device.

    Args:
        kinds: Of runs.
        names: Of faults.
        disk: The folder of backups.
        folder: An empty folder.
    """

    def __init__(self, kinds: Sequence[Kind], names: Sequence[str], disk: Path, folder: Path) -> None:
        self.table, self.runs = Table(), 0
        self._kinds, self._disk, self._folder = kinds, disk, folder
        self._rng = random.Random(SEED)
        self._drawn = drawn(names, self._rng)

    def run(self, many: int, expected: dict[str, Any], **variables: str) -> None:
        """Makes one run, with a few of so many faults in all."""
        folder = self._folder / f"run{self.runs}"
        folder.mkdir()
        run = Run(self._kinds[self.runs % len(self._kinds)], folder, self._disk, variables)
        self.runs += 1
        try:
            before, is_over = self.table.count, False
            while not is_over and self.table.count < min(many, before + FAULTS_OF_A_RUN):
                is_over = inject(run, *next(self._drawn), self._rng, self.table)
            finish(run)
        finally:
            run.end()
        found = run.found()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=run.errors)
        assert run.left() == []
        self.table.compared = self.table.count


def try_all(drawing: Drawing, many: int, expected: dict[str, Any], capsys: pytest.CaptureFixture[str], **variables: str) -> None:
    """Injects so many faults, and prints the table, even if a result differs."""
    began, table = time.monotonic(), drawing.table
    try:
        while table.count < many:
            drawing.run(many, expected, **variables)
            with capsys.disabled():
                print(f"run {drawing.runs}: {table.count} faults until now", flush=True)
    finally:
        with capsys.disabled():
            seconds = time.monotonic() - began
            print(
                f"\n{table.count} faults in {drawing.runs} runs (seed {SEED}, {seconds:.0f} seconds)."
                f" {table.compared} of them are in runs that ended with one device's result:\n{table}",
                flush=True,
            )


def test_no_fault_changes_a_result(
    disk: Path, tmp_path: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [Kind(["-n", "2", "--communicator", each]) for each in [*ON_ONE_MACHINE, *COMMUNICATORS]]
    kinds += [Kind(["-n", "2", "--strategy", "mirrored"])]
    names = [what for what in FAULTS if what not in OF_HOSTS and (what != "the disk is full" or os.path.ismount(disk))]
    try_all(Drawing(kinds, names, disk, tmp_path), MANY - MANY_ON_HOSTS, expected, capsys)


@needs_networks
def test_no_fault_on_two_hosts_changes_a_result(
    disk: Path, tmp_path: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with two_networks() as hosts:
        drawing = Drawing(list(kinds_on_hosts(hosts, COMMUNICATORS)), ON_HOSTS, disk, tmp_path)
        try_all(drawing, MANY_ON_HOSTS, expected, capsys, TFREP_SECRET_FILE=str(secret))


def test_no_kill_of_a_cluster_costs_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, servers and coordinators of asynchronous training are killed; every step counts once."""
    rng, began, counts, runs = random.Random(SEED), time.monotonic(), Counter[str](), 0
    while counts.total() < (MANY + 1) // 2:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        runs += 1
        output, killed = killed_run(folder, min((MANY + 1) // 2 - counts.total(), 10), rng)
        counts.update(killed)
        assert output.splitlines()[-1] == "ParameterServerStrategy 1500 True"
    with capsys.disabled():
        print(f"\n{counts.total()} kills in {runs} runs (seed {SEED}, {time.monotonic() - began:.0f} seconds): {dict(counts)}")
