"""Scenarios on this machine's GPU if it has one, else two of them on its CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfrep_strategy.nvidia import driver_gpus

_PROGRAM = Path(__file__).parent / "scenario_program.py"
_REPOSITORY = _PROGRAM.parents[2]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", ["mirrored", "processes"])
def test_two_replicas_give_one_devices_answer(place: str) -> None:
    gpus = driver_gpus()
    names = [] if gpus else ["adam", "masked_sequence"]
    # This process hides GPUs from its own tests.
    environ = os.environ | {"PYTHONPATH": str(_REPOSITORY), "CUDA_VISIBLE_DEVICES": "0" if gpus else "-1"}
    command = [sys.executable, str(_PROGRAM), place, *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {finding["scenario"] for finding in findings} >= set(names or ["adam"])
    assert all(("GPU" if gpus else "CPU") in finding["device"] for finding in findings)
    # With XLA, which GPUs take by default, Keras alone cannot run some.
    compared = [finding for finding in findings if not finding["wrong"].startswith("one device fails")]
    assert compared
    assert not [finding for finding in compared if finding["holds"] != 1e-5]
