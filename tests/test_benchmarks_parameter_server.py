"""The benchmarks of the parameter servers run, with tiny settings; and the digits reach what one device reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lane("servers")

_REPOSITORY = Path(__file__).resolve().parent.parent


def _run(path: Path, module: str, *arguments: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(path)]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text("utf-8"))
    assert written["machine"].keys() >= {"cores", "processor", "load_1min", "commit", "tensorflow", "keras"}
    return written["results"], done.stdout


def test_steps_per_second(tmp_path: Path) -> None:
    results, text = _run(tmp_path / "result.json", "parameter_server", "--steps", "4", "--epochs", "2", "--rounds", "1")
    assert {"ours, 1 workers", "ours, 2 workers", "ours, fed, 2 workers"} <= set(results["medians"])
    assert all(len(samples) == 2 and min(samples) > 0 for samples in results["samples"].values())
    assert "2 workers against 1" in text


def test_the_digits_reach_the_accuracy_of_one_device(tmp_path: Path) -> None:
    results, _ = _run(tmp_path / "result.json", "staleness", "--seeds", "1")
    alone = results["one device"][0]
    assert alone["accuracy"] > 0.88
    for mode, runs in results.items():
        # Two workers that wait for each other make half as many updates.
        assert runs[0]["accuracy"] > alone["accuracy"] - (0.02 if mode.startswith("sync") else 0.01), mode
    assert results["asynchronous"][0]["updates"] == alone["updates"] == 450
    assert results["sync"][0]["updates"] == 230  # 45 batches are 22 updates of two, and one of one.
    assert results["sync"][0]["train_loss"][-1] == pytest.approx(alone["train_loss"][-1], abs=0.15)
