"""Ray's trainer for TensorFlow, for real: it sets `TF_CONFIG` in its workers, and they are the ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from starting import done, found_in

SCRIPT = str(Path(__file__).with_name("scripts") / "in_ray.py")


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_workers_of_ray_learn_what_one_device_learns(tmp_path: Path) -> None:
    output, _ = done([sys.executable, SCRIPT], tmp_path, RAY_USAGE_STATS_ENABLED="0")
    in_ray, alone = found_in(output)
    assert (in_ray["ranks"], in_ray["communicator"]) == ([0, 1], "tf")
    assert alone["ranks"] == [0]
    np.testing.assert_allclose(in_ray["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    assert in_ray["history"].keys() == alone["history"].keys() == {"loss", "mae"}
    for name, values in alone["history"].items():
        np.testing.assert_allclose(in_ray["history"][name], values, rtol=1e-4)
