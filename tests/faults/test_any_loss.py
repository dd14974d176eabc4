"""Faults that are drawn at random, from outside, one after the other: runs end as one that nobody disturbed.

`TFREP_FAULTS` says how many there are, 3 by default, and `TFREP_FAULTS_SEED` which.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster_kills import killed_run
from injecting import AIMS, FAULTS, SCRIPT, START_SECONDS, Run, Table, environ, finish, found_in, inject

from tfrep_strategy.processes.identity import horovod_is_installed

MANY = int(os.environ.get("TFREP_FAULTS", "3"))
SEED = int(os.environ.get("TFREP_FAULTS_SEED", "0"))
FAULTS_OF_A_RUN = 5
KINDS = [["-n", "2", "--communicator", "tf"], ["-n", "2", "--strategy", "mirrored"]]
"""Of runs."""
pytestmark = pytest.mark.timeout(300 + 100 * MANY)
if horovod_is_installed():
    KINDS.append(["-n", "2", "--communicator", "horovod"])


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


def test_no_fault_changes_a_result(disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "alone").mkdir()
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path / "alone", env=environ(), capture_output=True, text=True, timeout=START_SECONDS
    )
    expected = found_in(alone.stdout)
    rng, table, runs, began = random.Random(SEED), Table(), 0, time.monotonic()
    kinds = [what for what in FAULTS if what != "the disk is full" or os.path.ismount(disk)]
    drawn: Iterator[tuple[str, str]] = itertools.chain.from_iterable(
        rng.sample(pairs, len(pairs)) for pairs in itertools.repeat([(what, aim) for what in kinds for aim in AIMS])
    )
    try:
        while table.count < MANY:
            folder = tmp_path / f"run{runs}"
            folder.mkdir()
            run = Run(KINDS[runs % len(KINDS)], folder, disk)
            runs += 1
            try:
                before, is_over = table.count, False
                while not is_over and table.count < min(MANY, before + FAULTS_OF_A_RUN):
                    is_over = inject(run, *next(drawn), rng, table)
                finish(run)
            finally:
                run.end()
            found = run.found()
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6, err_msg=run.errors[-3000:])
            assert list(disk.iterdir()) == [], "nothing is left of backups"
            with capsys.disabled():
                print(f"run {runs}: {table.count} faults until now")
    finally:
        with capsys.disabled():
            seconds = time.monotonic() - began
            print(f"\n{table.count} faults in {runs} runs (seed {SEED}, {seconds:.0f} seconds):\n{table}", flush=True)


def test_no_kill_of_a_cluster_costs_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, servers and coordinators of asynchronous training are killed; every step counts once."""
    rng, began, counts, runs = random.Random(SEED), time.monotonic(), Counter[str](), 0
    while counts.total() < (MANY + 1) // 2:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        runs += 1
        output, killed = killed_run(folder, min((MANY + 1) // 2 - counts.total(), 10), rng)
        counts.update(killed)
        assert output.splitlines()[-1] == "ParameterServerStrategy 1200 True"
    with capsys.disabled():
        print(f"\n{counts.total()} kills in {runs} runs (seed {SEED}, {time.monotonic() - began:.0f} seconds): {dict(counts)}")
