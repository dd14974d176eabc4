"""What the tests of the parameter-server strategy share: programs that run against a cluster of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from calling import command

ROOT = Path(__file__).resolve().parents[2]


def data(rows: int = 640) -> tuple[np.ndarray, np.ndarray]:
    """Makes examples of a linear function."""
    rng = np.random.RandomState(0)
    x = rng.randn(rows, 4).astype("float32")
    return x, (x @ rng.randn(4, 1)).astype("float32")


def dense_model(optimizer: Any = None, metrics: Sequence[Any] = ("mae",)) -> keras.Model:
    """Makes a model of two layers, compiled."""
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", metrics=list(metrics))
    return model


def environ_in(folder: Path) -> dict[str, str]:
    """The environment of a process whose temporary files are in a folder of its own."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(temporary)}
    return os.environ | own


def left_behind(folder: Path) -> list[str]:
    """The temporary files of this package that are still there."""
    return [path.name for path in (folder / "temporary").glob("tfrep-*")]


def start(program: Callable[..., None], *arguments: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    """Starts a function of a test module in a process of its own."""
    return subprocess.Popen(
        command(program, *arguments),
        cwd=folder,
        env=environ_in(folder) | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: Callable[..., None], *arguments: str, folder: Path, seconds: float = 200.0, status: int = 0) -> str:
    """Runs a function in a process of its own, which has to end with an exit code and leave nothing; returns its errors."""
    process = start(program, *arguments, folder=folder)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, out + err[-3000:]
    assert not left_behind(folder)
    return err
