"""Runs the scripts that use packages around Keras, alone and on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tfrep_strategy

SCRIPTS = Path(__file__).with_name("scripts")
_ROOT = str(Path(tfrep_strategy.__file__).parents[1])


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with this package, and with nothing that tells a tracker to be silent."""
    own = {
        "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    kept = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=kept | own, capture_output=True, text=True, timeout=280, check=False
    )


def results(text: str) -> list[Any]:
    """Returns what a script has printed as its results."""
    return [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]


def of_ranks(folder: Path, script: str, *arguments: str) -> list[Any]:
    """Returns what each of two ranks has printed."""
    done = run(folder, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", str(SCRIPTS / script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return results(done.stdout) + results((folder / "logs" / "rank1.log").read_text("utf-8"))
