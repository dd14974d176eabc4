"""A program that is killed again and again, while it writes its backups, ends as one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from file_states import hidden

pytestmark = pytest.mark.lane("faults")

_IN_THE_FOREGROUND = """
import json, os, signal, sys
import keras
import tfrep_strategy as tfrep
tfrep.use_logical_cpus(2)
from file_states import Watching
from small_training import Program, fit, mirrored, state

folder, killed_in, killed_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
points = []

class Killed(keras.callbacks.BackupAndRestore):
    def _save_model(self):
        points.append(0)
        with Watching(self.count):
            super()._save_model()

    def count(self):
        if (len(points), points[-1]) == (killed_in, killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        points[-1] += 1

program = Program(mirrored())
fit(program.start(), 4, Killed(folder, save_freq=1))
print(json.dumps([points, [data.hex() for data in state(program.model)]]))
"""

_IN_THE_BACKGROUND = """
import json, os, signal, sys, threading
os.environ |= {"TFREP_BACKUP_DIR": sys.argv[1], "TFREP_BACKUP_SECONDS": "0"}
import tfrep_strategy as tfrep
tfrep.use_logical_cpus(2)
from file_states import Watching
from small_training import Program, fit, mirrored, state
from tfrep_strategy.keras_integration.synchronous import run_backups

killed_in, killed_at = int(sys.argv[2]), int(sys.argv[3])
points = []

def count():
    if threading.current_thread().name.startswith("tfrep-write"):
        thread = threading.get_native_id()
        if not points or points[-1][0] != thread:
            points.append([thread, 0])
        if (len(points), points[-1][1]) == (killed_in, killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        points[-1][1] += 1

program = Program(mirrored())
with Watching(count):
    fit(program.start(), 4)
print(json.dumps([[number for _, number in points], [data.hex() for data in state(program.model)]]))
"""


def _run(program: str, folder: Path, killed_in: int = 0, killed_at: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the program, which is killed in one of its backups, before one of its calls that may change a file."""
    tests = Path(__file__).resolve().parents[1]
    paths = [*map(str, (tests, tests / "keras_integration", tests.parent))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program, str(folder), str(killed_in), str(killed_at)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize(
    ("program", "at_least"), [(_IN_THE_FOREGROUND, 8), (_IN_THE_BACKGROUND, 9)], ids=["foreground", "background"]
)
def test_a_program_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(
    program: str, at_least: int, tmp_path: Path
) -> None:
    undisturbed = _run(program, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    points, expected = json.loads(undisturbed.stdout)
    assert len(points) >= at_least
    num_backups = len(points)
    folder, num_points = tmp_path / "backup", min(points)
    for killed_in, part in ((2, 0.5), (3, 0.95), (1, 0.8)):
        killed = _run(program, folder, killed_in, int(part * num_points))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert folder.exists()
    finished = _run(program, folder)
    assert finished.returncode == 0, finished.stderr
    points, weights = json.loads(finished.stdout)
    assert weights == expected
    assert 0 < len(points) < num_backups
    assert folder.exists() == (program is _IN_THE_BACKGROUND), "a launcher removes it"
    assert not hidden(folder)
