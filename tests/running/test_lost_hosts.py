"""`tfrep run --hosts --max-restarts`: what is lost on one of two machines, the run ends with one device's weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from networks import HOSTS, cable_cut
from test_hosts import BOTH, LIMIT, ended, machines, start, wait_for  # noqa: F401
from test_joining import SCRIPTS, environ, found_in
from test_two_hosts import hosts  # noqa: F401
from two_machines import Machine, needs_machines

from tfrep_strategy.progress import Progress, Step

pytestmark = [pytest.mark.lane("hosts"), needs_machines]
PROGRAM = [str(SCRIPTS / "goes_slowly.py"), "3", "0.1"]


def lose_rank(machines: list[Machine]) -> None:  # noqa: F811
    ranks = [pid for pid in machines[1].pids() if b"goes_slowly.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(ranks), signal.SIGKILL)


def lose_launcher(machines: list[Machine]) -> None:  # noqa: F811
    [agent] = [pid for pid in machines[1].pids() if b"running.on_host" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2]]
    os.kill(agent, signal.SIGKILL)


def lose_cable(machines: list[Machine]) -> None:  # noqa: F811
    with cable_cut(machines[0].name):
        time.sleep(30)


@pytest.mark.parametrize("lose", [lose_rank, lose_launcher, lose_cable])
def test_a_loss_changes_nothing(lose: Callable[..., None], start: Callable, machines: list[Machine], tmp_path: Path) -> None:  # noqa: F811
    backups = tmp_path / "backups"
    run = start("--hosts", BOTH, "--max-restarts", "1", "--backup-dir", str(backups), *PROGRAM, TFREP_BACKUP_SECONDS="0")
    progress = Progress(backups)
    wait_for(lambda: (progress.read() or Step(0, 0, 0)) >= Step(0, 1, 3) or run.poll() is not None, LIMIT)
    lose(machines)
    code, output, errors = ended(run)
    assert code == 0, errors
    assert "All ranks are started again (1 of 1)." in errors
    assert "fit goes on from its backup: epoch 1" in errors
    command = [sys.executable, PROGRAM[0], "3", "0"]
    alone = subprocess.run(command, env=environ(), capture_output=True, text=True, check=True, timeout=LIMIT)
    [found], [expected] = found_in(output), found_in(alone.stdout)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    assert list(backups.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (None, "A run on several machines is started again from backups, in a folder that all of them reach."),
        ("own", f"{HOSTS[1]}: This host does not see in the folder for backups what machine 0 has written there."),
    ],
)
def test_folders_that_not_all_reach(folder: str | None, said: str, start: Callable, machines: list[Machine]) -> None:  # noqa: F811
    where = [] if folder is None else ["--backup-dir", str(machines[0].folder / folder / "backups")]
    code, _, errors = ended(start("--hosts", BOTH, "--max-restarts", "1", *where, *PROGRAM))
    assert code == 2
    assert said in errors
