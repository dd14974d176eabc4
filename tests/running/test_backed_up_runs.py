"""Runs that are backed up by the launcher's wish: killed or asked to end inside an epoch, they end as if nothing had happened."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import refuses
from test_joining import LIMIT, SCRIPTS, environ, found_in

from tfrep_strategy.running.function import launch

pytestmark = pytest.mark.lane("faults")

SCRIPT = str(SCRIPTS / "goes_on.py")
RUN = [sys.executable, "-m", "tfrep_strategy.cli", "run"]
KINDS = {
    "tf": ["-n", "2", "--communicator", "tf"],
    "horovod": ["-n", "2", "--communicator", "horovod"],
    "shared_memory": ["-n", "2", "--communicator", "shared_memory"],
    "mirrored": ["-n", "2", "--strategy", "mirrored"],
}


def ended(command: Sequence[str], folder: Path, exit_code: int = 0, **own: str) -> tuple[str, str]:
    """Runs a command that backs up after each step, and returns what it wrote to standard output and error."""
    variables = environ(**{"TFREP_BACKUP_SECONDS": "0"} | own)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == exit_code, done.stderr[-3000:]
    return done.stdout, done.stderr


def fits_in(output: str) -> list[Any]:
    (found,) = found_in(output)
    return found["fits"]  # type: ignore[return-value]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one device learns."""
    return fits_in(ended([sys.executable, SCRIPT], tmp_path_factory.mktemp("alone"))[0])


def check(found: list[Any], expected: list[Any]) -> None:
    """Weights, history, the learning rate, and what callbacks remember are those of one device."""
    for own, alone in zip(found, expected, strict=True):
        for values, wanted in zip(own, alone, strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_inside_epochs_ends_as_one_device(kind: str, undisturbed: list[Any], tmp_path: Path) -> None:
    rank = 0 if kind == "mirrored" else 1
    kill = json.dumps(["self", signal.SIGKILL, [[rank, 1, 1, 5]]])
    output, said = ended([*RUN, *KINDS[kind], "--max-restarts", "1", SCRIPT, kill], tmp_path)
    check(fits_in(output), undisturbed)
    assert said.count("Each fit resumes from its last backup.") == 1
    assert "this fit was finished before. It is not repeated." in said
    # The kill may come before the last backup is on the disk.
    assert re.search("fit resumes from its backup: epoch 1, batch [45].", said)


def test_a_run_that_is_lost_twice_at_one_step(tmp_path: Path) -> None:
    """Once more would be in vain, though it might be started seven times more."""
    kill = json.dumps(["self", signal.SIGKILL, [[1, 0, 1, 2], [1, 0, 1, 5], [1, 0, 1, 5]]])
    _, said = ended([*RUN, *KINDS["tf"], "--max-restarts", "9", SCRIPT, kill], tmp_path, 128 + signal.SIGKILL)
    assert said.count("All ranks are started again") == 2
    assert "The run was lost twice at the same step: fit 0, epoch 1, batch 5. It is not started again." in said


@pytest.mark.parametrize("who", ["self", "launcher"])
def test_who_is_asked_to_end_makes_a_backup_first(who: str, undisturbed: list[Any], tmp_path: Path) -> None:
    run = [*RUN, *KINDS["tf"], "--max-restarts", "2", "--backup-dir", "backups", SCRIPT]
    asks = json.dumps([who, signal.SIGTERM, [[1, 0, 2, 3]]])
    # A launcher ends as the signal would have had it end: by the signal.
    exit_code = -signal.SIGTERM if who == "launcher" else 128 + signal.SIGTERM
    output, said = ended([*run, asks], tmp_path, exit_code)
    assert output == ""
    assert "asked to end. A backup was made: epoch 2" in said
    assert "started again" not in said
    output, said = ended(run, tmp_path)  # A later start of the same run.
    check(fits_in(output), undisturbed)
    assert "fit resumes from its backup: epoch 2" in said
    assert list((tmp_path / "backups").iterdir()) == []


def test_a_backup_at_the_end_of_the_last_epoch(undisturbed: list[Any], tmp_path: Path) -> None:
    """The fit has not ended, and has no epoch left. The next one reads the data in the order that comes after these epochs."""
    run = [*RUN, *KINDS["mirrored"], "--backup-dir", "backups", SCRIPT]
    last = undisturbed[0][0][-1]
    _, said = ended([*run, json.dumps(["self", signal.SIGTERM, [[0, 0, last, "end"]]])], tmp_path, 128 + signal.SIGTERM)
    assert f"asked to end. A backup was made: epoch {last + 1}, batch 0." in said
    output, said = ended(run, tmp_path)
    found = fits_in(output)
    check([found[0][2:], found[1]], [undisturbed[0][2:], undisturbed[1]])
    assert "this fit was finished before. It is not repeated." in said


def test_a_slow_backup_has_the_grace_time(tmp_path: Path) -> None:
    """The launcher is asked to end, twice, and waits for a backup that takes longer than ranks have by default."""
    run = [*RUN, *KINDS["tf"], "--backup-dir", "backups", str(SCRIPTS / "saves_slowly.py")]
    _, said = ended([*run, "5"], tmp_path, -signal.SIGTERM, TFREP_BACKUP_SECONDS="1000")
    assert "asked to end. A backup was made: epoch 2, batch 0." in said
    output, said = ended([*run, "0"], tmp_path)
    assert "fit resumes from its backup: epoch 2, batch 0." in said
    assert found_in(output) == [{"epochs": [2]}]
    _, said = ended([*run, "5"], tmp_path, -signal.SIGTERM, TFREP_BACKUP_SECONDS="1000", TFREP_GRACE="2")
    assert "A backup was made" not in said


def test_a_time_between_backups_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a rank is started."""
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "abc")
    with refuses(TFREP_BACKUP_SECONDS="abc"):
        launch(int, num_replicas=2)
