"""`benchmarks.gpu` on this machine: on its GPUs if it has any, else as far as logical CPUs go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfrep_strategy.nvidia import driver_gpus

_REPOSITORY = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("place", "checks"),
    [("two logical devices", ["fit", "XLA", "bfloat16", "speed"]), ("two processes", ["GAN"])],
)
def test_its_checks_hold(place: str, checks: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    shown = _run("--dry-run", "--places", place, "--checks", *checks, "--json", str(path))
    whole = json.loads(path.read_text("utf-8"))
    assert whole["machine"]["gpus"] == [gpu.name for gpu in driver_gpus()]
    found = [finding["check"] for finding in whole["findings"]]
    assert all(any(check in name for name in found) for check in checks)
    assert all(finding["ok"] for finding in whole["findings"])
    assert all(name[:20] in shown for name in found)


def test_the_profile_of_a_step_has_kernels_where_there_is_a_gpu() -> None:
    arguments = ["halves", "dense", "--steps", "2", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu_profile", *arguments]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout)
    assert found["milliseconds"] > 0
    assert (found["kernels"] > 0) == (found["busy_milliseconds"] > 0) == bool(driver_gpus())


def test_without_a_gpu_it_asks_for_a_dry_run() -> None:
    if driver_gpus():
        assert "ok" in _run("--places", "two logical devices", "--checks", "fit")
        return
    command = [sys.executable, "-m", "benchmarks.gpu"]
    refused = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--dry-run" in refused.stderr


def test_the_table_of_the_documentation_is_what_the_results_say() -> None:
    environ = os.environ | {"COLUMNS": "200"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--markdown"]
    table = subprocess.run(command, cwd=_REPOSITORY, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert table.stdout.strip() in (_REPOSITORY / "docs" / "gpus.md").read_text("utf-8")
