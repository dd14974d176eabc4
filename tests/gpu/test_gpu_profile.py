"""`benchmarks.gpu_profile` and `benchmarks.rounding` on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rounding import largest_differences
from tfrep_strategy.cluster.hardware import driver_gpus
from tfrep_strategy.contrib.gpu_report.programs import EXACT, PROGRAMS

pytestmark = pytest.mark.lane("gpus")

_REPOSITORY = Path(__file__).resolve().parents[2]


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
