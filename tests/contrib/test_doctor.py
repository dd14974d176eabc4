"""The report of `tfrep doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tfrep_strategy.cluster.hardware import SHARES_MEMORY, Gpu
from tfrep_strategy.cluster.identity import horovod_is_installed
from tfrep_strategy.contrib import doctor


def values(report: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in report}


@pytest.mark.lane("package")
def test_self_test_on_every_communicator_that_is_there():
    """What the command prints is its own: nothing of TensorFlow's log."""
    environ = os.environ | {"PYTHONPATH": str(Path(doctor.__file__).parents[2])}
    environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, "-m", "tfrep_strategy.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    found = {finding["name"]: finding for finding in report["findings"] if finding["name"].startswith("Self-test")}
    wanted = {"tf": True, "shared_memory": SHARES_MEMORY, "horovod": horovod_is_installed()}
    assert found.keys() == {f"Self-test: {name}" for name, is_there in wanted.items() if is_there}
    for finding in found.values():
        assert finding["ok"], finding["value"]
        assert "[3.0, 3.0]" in finding["value"]


@pytest.mark.lane("package")
def test_it_names_versions_and_the_environment(monkeypatch):
    import keras

    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')
    found = values(doctor.examine(self_test=False))
    assert tf.__version__ in found["TensorFlow"].value
    assert keras.__version__ in found["Keras"].value
    assert "rank 1 of 2" in found["Environment"].value
    assert "TF_CONFIG=" in found["Environment"].value


@pytest.mark.lane("package")
def test_it_reports_what_is_broken(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "not JSON")
    report = doctor.examine(self_test=False)
    assert "not JSON" in values(report)["Environment"].value
    assert not doctor.show(report)
    assert "bad" in capsys.readouterr().out


@pytest.mark.lane("package")
def test_it_lists_the_gpus(monkeypatch):
    gpus = [Gpu(i, "made up", 80 << 30, 40 << 30) for i in range(2)]
    devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    monkeypatch.setattr(doctor, "driver_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "gpus_are_visible", lambda: True)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: devices)
    found = values(doctor.examine(self_test=False))
    assert found["GPU 1"].value == "made up, 40.0 of 80.0 GiB free"
    assert found["GPUs"].ok

    devices.clear()  # CUDA's libraries are not found.
    found = values(doctor.examine(self_test=False))
    assert found["GPUs"].ok is False
    assert "tensorflow[and-cuda]" in found["GPUs"].value


def test_json(capsys):
    report = [doctor.Finding("one", "[red]", ok=True), doctor.Finding("two", "2", ok=None)]
    assert doctor.show(report, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["healthy"] is True
    assert shown["findings"][0] == {"name": "one", "value": "[red]", "ok": True}
