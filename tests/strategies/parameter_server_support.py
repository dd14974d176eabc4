"""What the tests of the parameter-server strategy share: scripts that run against a cluster of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import sys, threading, time
import keras, numpy as np, tensorflow as tf
import tfrep_strategy as tfrep

def data(rows=640):
    rng = np.random.RandomState(0)
    x = rng.randn(rows, 4).astype("float32")
    return x, (x @ rng.randn(4, 1)).astype("float32")

def dense_model(optimizer=None, metrics=("mae",)):
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", metrics=list(metrics))
    return model
"""


def environ_in(folder: Path) -> dict[str, str]:
    """The environment of a process whose temporary files are in a folder of its own."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(temporary)}
    return os.environ | own


def left_behind(folder: Path) -> list[str]:
    """The temporary files of this package that are still there."""
    return [path.name for path in (folder / "temporary").glob("tfrep-*")]


def start(code: str, *arguments: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    """Starts a script with the prelude before it, in a process of its own."""
    script = folder / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environ_in(folder) | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, *arguments: str, folder: Path, seconds: float = 200.0) -> tuple[int, str, str]:
    """Runs a script to its end, after which nothing may be left; returns its exit code, output and errors."""
    process = start(code, *arguments, folder=folder)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    assert not left_behind(folder)
    return process.returncode, out, err
