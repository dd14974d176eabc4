"""Scenarios and collectives, on this machine's GPU if it has one, else a few of them on its CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfrep_strategy.cluster.hardware import driver_gpus

pytestmark = pytest.mark.lane("gpus")

_FOLDER = Path(__file__).parent


def findings_of(program: str, place: str, names: list[str]) -> list[dict[str, Any]]:
    """Runs a program of this folder, and returns what it has found."""
    # This process hides GPUs from its own tests.
    environ = os.environ | {"PYTHONPATH": str(_FOLDER.parents[1]), "CUDA_VISIBLE_DEVICES": "0" if driver_gpus() else "-1"}
    command = [sys.executable, str(_FOLDER / program), place, *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def are_on_this_machines_device(findings: list[dict[str, Any]]) -> bool:
    return all(("GPU" if driver_gpus() else "CPU") in finding["device"] for finding in findings)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", ["mirrored", "processes"])
def test_two_replicas_give_one_devices_answer(place: str) -> None:
    names = [] if driver_gpus() else ["adam", "masked_sequence"]
    findings = findings_of("scenario_program.py", place, names)
    assert {finding["scenario"] for finding in findings} >= set(names or ["adam"])
    assert are_on_this_machines_device(findings)
    # With XLA, which GPUs take by default, Keras alone cannot run some.
    compared = [finding for finding in findings if not finding["wrong"].startswith("one device fails")]
    assert compared
    assert not [finding for finding in compared if finding["holds"] != 1e-5]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", ["mirrored", "tf"])
def test_collectives_are_those_of_the_contract(place: str) -> None:
    dtypes = [] if driver_gpus() else ["float32"]
    findings = findings_of("collectives_program.py", place, dtypes)
    assert {(finding["how"], finding["dtype"]) for finding in findings} >= {("eager", "float32"), ("traced", "float32")}
    assert not [finding for finding in findings if finding["wrong"]]
    assert are_on_this_machines_device(findings)
