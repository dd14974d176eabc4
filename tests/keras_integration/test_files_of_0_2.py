"""Files that 0.2.0 wrote still load: a model, a backup of Keras's callback, and a backup of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep

_FILES = Path(__file__).with_name("files_of_0_2")
_LOSSES = [2.4791643619537354, 2.441159963607788, 2.405717134475708, 2.370750665664673]
"""Of the four epochs of `trains.py`, as 0.2.0 wrote them."""


@pytest.mark.lane("quick")
def test_a_model_file_loads() -> None:
    x = np.linspace(-1, 1, 96, dtype="float32").reshape(24, 4)
    y = np.stack([x.sum(1), x[:, 0] * x[:, 1]], axis=1)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.models.load_model(_FILES / "model.keras")
    assert int(model.optimizer.iterations) == 12
    assert model.evaluate(x, y, batch_size=8, verbose=0) == pytest.approx(2.348581552505493, rel=1e-5)  # As plain Keras says of it.


@pytest.mark.lane("resumed")
@pytest.mark.parametrize("kind", ["keras_backup", "run_backup"])
def test_a_backup_is_resumed(kind: str, tmp_path: Path) -> None:
    shutil.copytree(_FILES / kind, tmp_path / kind)
    options, own = ([], {"BACKUP": kind}) if kind == "keras_backup" else (["--backup-dir", kind], {})
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", *options, str(_FILES / "trains.py")]
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(word) for word in done.stdout.split()[1:]]
    # Keras's callback restores the weights, and `fit` returns the epochs since. A run's backup restores the history, too.
    np.testing.assert_allclose(losses, _LOSSES[2:] if kind == "keras_backup" else _LOSSES, rtol=1e-5)
    assert kind == "keras_backup" or "epoch 2" in done.stderr
