"""`tfrep doctor --gpus`, on two logical CPUs, and the tables that are made of what it finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfrep_strategy.contrib.gpu_report import report as made
from tfrep_strategy.contrib.gpu_report.measured import _ON_CPUS
from tfrep_strategy.contrib.gpu_report.programs import PROGRAMS, largest_difference
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.strategies.mirrored import MirroredStrategy

_REPOSITORY = Path(__file__).resolve().parents[2]
_RESULTS = _REPOSITORY / "benchmarks" / "results"
sys.path.append(str(_REPOSITORY))  # At the end: where the package is installed, that one is tested.


@pytest.mark.lane("gpus")
def test_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tfrep_strategy.cli", "doctor", "--gpus", "--devices", "CPU", "--report", str(path), "--json"]
    environ = os.environ | {"PYTHONPATH": str(_REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text("utf-8"))
    assert json.loads(done.stdout) == found
    assert found["schema"] == 1
    assert found["machine"].keys() == {"python", "tensorflow", "keras", "cores", "cuda_of_driver", "nccl", "gpus"}
    assert (found["devices"], found["machine"]["gpus"], found["left_out"]) == ("CPU", [], [])
    places = {each["place"] for each in found["findings"]}
    assert {place.partition(",")[0] for place in places} == {"one process", "processes", "deterministic operations"}
    for each in found["findings"]:
        assert each["ok"], each
        assert float(each["found"].partition(",")[0]) < 1e-5
    assert {each["check"] for each in found["findings"]} == set(_ON_CPUS)
    assert [(each["kind"], each["replicas"]) for each in found["scaling"]] == [
        ("plain Keras", 1), ("processes", 2), ("one process", 2),
    ]  # fmt: skip
    assert all(each["examples_per_second"] > 0 for each in found["scaling"])
    made.show(found)


@pytest.mark.lane("gpus")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in _ON_CPUS])
def test_other_programs_hold_on_cpus(name: str) -> None:
    program = PROGRAMS[name]
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], check_sync_every=3, allow_plain_models=True, **program.settings)
    assert largest_difference(program.run(strategy), program.run(None)) <= program.tolerance


@pytest.mark.lane("package")
def test_a_part_that_takes_too_long_is_ended() -> None:
    found, problem = made._measured("one process", 2, "CPU", 0.5)
    assert (found, problem) == ([], "it took more than 0 s")
    found, problem = made._measured("no such part", 2, "CPU", 100.0)
    assert (found, problem) == ([], "it ended with code 1")


@pytest.mark.lane("quick")
def test_what_there_is_no_time_for_is_told() -> None:
    found = made.report("CPU", seconds=0.0)
    assert not found["findings"]
    assert not found["scaling"]
    assert [each["part"] for each in found["left_out"]] == [part for part, _ in made._parts(0)]
    assert {each["why"] for each in found["left_out"]} == {"no time was left"}


@pytest.mark.lane("quick")
def test_all_gpus_come_first() -> None:
    parts = list(made._parts(8))
    assert parts[:3] == [("one process", 8), ("processes", 8), ("speed: plain Keras", 1)]
    assert [count for part, count in parts if part == "speed: processes"] == [8, 1, 4, 2]
    assert ("processes", 2) in made._parts(1)


@pytest.mark.lane("quick")
def test_machines_without_gpus_are_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(made, "gpus_are_visible", lambda: False)
    with pytest.raises(ConfigurationError, match=r"There is no GPU here that programs may use.\nHint: .*--devices CPU"):
        made.write_report("GPU", tmp_path / "report.json")
    with pytest.raises(ConfigurationError, match="No such kind of devices. Received: devices='TPU'"):
        made.write_report("TPU", tmp_path / "report.json")
    with pytest.raises(ConfigurationError, match="There is no folder for the report."):
        made.write_report("CPU", tmp_path / "absent" / "report.json")


def _eight() -> dict[str, Any]:
    def speed(kind: str, replicas: int, rate: float) -> dict[str, Any]:
        return {"kind": kind, "replicas": replicas, "net": "ResNet-50", "examples_per_second": rate}

    checks = [
        {"check": name, "expected": "one device's numbers to 1e-05", "found": "1e-7", "ok": name != "fit"} for name in PROGRAMS
    ]
    return {
        "schema": 1, "version": "0.3.0", "machine": {"gpus": ["Made Up"] * 8},
        "findings": [{"place": "processes, 8 replicas", **each} for each in checks],
        "scaling": [speed("plain Keras", 1, 1000.0), speed("processes", 8, 7200.0)], "left_out": [],
    }  # fmt: skip


@pytest.mark.lane("quick")
def test_the_table_says_what_the_files_say(tmp_path: Path) -> None:
    from benchmarks.gpus_page import write_page

    page, committed = tmp_path / "gpus.md", _REPOSITORY / "docs" / "gpus.md"
    shutil.copy(committed, page)
    write_page(page, _RESULTS)
    assert page.read_text("utf-8") == committed.read_text("utf-8")
    assert "No machine with several GPUs has run it yet." in page.read_text("utf-8")
    for file in _RESULTS.glob("gpu-*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "gpu-eight.json").write_text(json.dumps(_eight()), "utf-8")
    write_page(page, tmp_path)
    text = page.read_text("utf-8")
    right, all_ = len(PROGRAMS) - 1, len(PROGRAMS)
    assert f"| 8 × Made Up | 0.3.0 | processes, 8 replicas | {right} of {all_} | fit |" in text
    assert "| 8 × Made Up | processes | 8 | ResNet-50 | 7,200 | 90% |" in text
    assert "No machine with several GPUs has run it yet." not in text
    assert "| 1 × NVIDIA H200 |" in text
