"""Callbacks of MLflow and of Weights & Biases, with the real packages: they report once, from the chief."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfrep_strategy
from tfrep_strategy.cluster.identity import horovod_is_installed

pytestmark = pytest.mark.lane("callbacks")

pytest.importorskip("mlflow")
pytest.importorskip("wandb")

_SCRIPT = Path(__file__).with_name("scripts") / "tracks.py"
_ROOT = str(Path(tfrep_strategy.__file__).parents[1])


@pytest.fixture(params=["tf", "horovod"])
def reports(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """What each of two ranks has reported."""
    if request.param == "horovod" and not horovod_is_installed():
        pytest.skip("Horovod is not installed.")
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", request.param]
    offline = {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environ = os.environ | offline | {"PYTHONPATH": _ROOT, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [*command, str(_SCRIPT), str(tmp_path)], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_chief_reports(reports: list[dict[str, Any]]) -> None:
    chief, other = reports
    assert chief["history"] == other["history"]
    last = {name: values[-1] for name, values in chief["history"].items()}
    assert {name: chief["wandb"][f"epoch/{name}"] for name in last} == pytest.approx(last, rel=1e-6)
    assert {name: chief["mlflow"][name] for name in last} == pytest.approx(last, rel=1e-6)
    assert chief["epochs"] == [0, 1, 2]
    assert "optimizer_learning_rate" in chief["parameters"]
    assert not other["wandb"]
    assert not other["mlflow"]
    assert not other["parameters"]
