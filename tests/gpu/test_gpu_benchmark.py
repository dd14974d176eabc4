"""`benchmarks.gpu` on this machine: on its GPUs if it has any, else as far as logical CPUs go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_programs import EXACT, PROGRAMS
from benchmarks.rounding import largest_differences
from tfrep_strategy.cluster.hardware import driver_gpus

pytestmark = pytest.mark.lane("gpus")

_REPOSITORY = Path(__file__).resolve().parents[2]


def _run(*arguments: str, **variables: str) -> str:
    command, environ = [sys.executable, "-m", "benchmarks.gpu", *arguments], os.environ | variables
    done = subprocess.run(command, cwd=_REPOSITORY, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("place", "onednn"),
    [("two logical devices", "1"), ("two processes", "0"), ("deterministic operations", "1")],  # oneDNN rounds otherwise.
)
def test_its_checks_hold(place: str, onednn: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    some = ["--checks", "fit", "bfloat16"] if driver_gpus() else []  # All of them take minutes on a GPU.
    shown = _run("--dry-run", "--places", place, *some, "--json", str(path), TF_ENABLE_ONEDNN_OPTS=onednn)
    whole = json.loads(path.read_text("utf-8"))
    assert whole["machine"]["gpus"] == [gpu.name for gpu in driver_gpus()]
    found = [finding["check"] for finding in whole["findings"]]
    assert set(found) >= ({"embedding, Adam", "fit"} if place == "deterministic operations" else set(some[1:] or PROGRAMS))
    assert all(finding["ok"] for finding in whole["findings"])
    assert all(name[:20] in shown for name in found)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_one_device_rounds_within_the_bound(policy: str) -> None:
    found = largest_differences(policy, conv_bias=False, seeds=1)
    assert all(difference <= PROGRAMS[policy].tolerance for difference in found.values()), found
    assert max(found.values()) > EXACT  # So the bound of float32 would be too small.


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
    assert table.stdout.strip() in (_REPOSITORY / "docs" / "gpu_measurements.md").read_text("utf-8")
