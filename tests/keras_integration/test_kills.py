"""A program that is killed again and again, while it writes its backups, ends as one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
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


def _run(folder: Path, killed_in: int = 0, killed_at: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the program, which is killed in one of its backups, before one of its calls that may change a file."""
    tests = Path(__file__).resolve().parents[1]
    paths = [*map(str, (tests, tests / "keras_integration", tests.parent))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(killed_in), str(killed_at)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_program_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    undisturbed = _run(tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    points, expected = json.loads(undisturbed.stdout)
    assert len(points) == 8
    folder, num_points = tmp_path / "backup", min(points)
    for killed_in, part in ((2, 0.5), (3, 0.95), (1, 0.8)):
        killed = _run(folder, killed_in, int(part * num_points))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert folder.exists()
    finished = _run(folder)
    assert finished.returncode == 0, finished.stderr
    points, weights = json.loads(finished.stdout)
    assert weights == expected
    assert 0 < len(points) < 8
    assert not folder.exists()
