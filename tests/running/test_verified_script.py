"""`tfrep verify`, as a user calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import in_lane
from test_joining import LIMIT, SCRIPTS, environ

_TESTS = str(Path(__file__).resolve().parents[1])
_KINDS = {"mirrored": ["--strategy", "mirrored"], "shared_memory": [], "tf": ["--communicator", "tf"]}


def _verified(*arguments: str, folder: Path, exit_code: int) -> str:
    path = os.pathsep.join([environ()["PYTHONPATH"], _TESTS])
    command = [sys.executable, "-m", "tfrep_strategy.cli", "verify", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environ() | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", in_lane("launchers", *_KINDS))
def test_a_healthy_script(kind: str, tmp_path: Path) -> None:
    told = _verified("-n", "2", *_KINDS[kind], str(SCRIPTS / "verified.py"), folder=tmp_path, exit_code=0)
    assert told.count("predicted") == 1, "runs to compare with say nothing"
    assert "Nothing differs from one device." in told
    assert re.search(r"Compared: \d+ steps of [3-9] functions, up to [1-9]\d\d tensors in each.", told)
    assert re.search(r"Results and weights of 5 calls were compared.", told), "fit, predict, and 3 steps"
    difference, tolerance = re.search(
        r"The largest difference: (\S+), of .* of call \d, .*; the tolerance is (\S+)\.\n", told
    ).groups()
    assert 0 < float(difference) <= float(tolerance)
    assert "Epochs ended after 3 steps, if they had more. With --full they take all." in told
    assert not list(tmp_path.iterdir())


@pytest.mark.lane("launchers")
@pytest.mark.parametrize("parts", ["1x4", "2x2", "sharded weights"])
def test_a_script_whose_weights_are_in_parts(parts: str, tmp_path: Path) -> None:
    script = str(SCRIPTS / "verified_parts.py")
    told = _verified("-n", "4", "--strategy", "mirrored", script, parts, folder=tmp_path, exit_code=0)
    assert "Nothing differs from one device." in told
    assert re.search(r"Compared: 3 steps of 1 functions, up to [1-9]\d\d tensors in each.", told)
    assert "Results and weights of 1 calls were compared." in told


@pytest.mark.parametrize("kind", ["mirrored", *in_lane("launchers", "shared_memory", "tf")])
def test_a_fault_in_a_step(kind: str, tmp_path: Path) -> None:
    script = str(SCRIPTS / "verified.py")
    told = _verified("-n", "2", *_KINDS[kind], "--steps", "1", script, "a mean for a sum", folder=tmp_path, exit_code=1)
    assert "The first that differs from one device: " in told
    assert re.search(r"  layer: +.*batch_normalization", told)
    line = next(i for i, text in enumerate(Path(script).read_text("utf-8").splitlines(), 1) if "model.fit" in text)
    assert re.search(rf"  line: +{re.escape(script)}:{line}\n", told)
    assert "  placement:" in told
    assert re.search(r"  (replica|rank): ", told)
    found, tolerance = (float(re.search(rf"  {name}: +(\S+)", told)[1]) for name in ("difference", "tolerance"))
    assert found > 100 * tolerance > 0


@pytest.mark.lane("launchers")
def test_a_fault_outside_of_steps(tmp_path: Path) -> None:
    told = _verified("-n", "2", "--strategy", "mirrored", str(SCRIPTS / "verified.py"), "a callback", folder=tmp_path, exit_code=1)
    assert "The first that differs from one device: result loss/1 of call 1, fit." in told, "the first epoch has ended before"
    assert "No step differs" in told


@pytest.mark.lane("launchers")
@pytest.mark.parametrize(("fault", "code", "text"), [("nothing to compare", 2, "Nothing was compared"), ("fails", 1, "has failed")])
def test_scripts_that_cannot_be_compared(fault: str, code: int, text: str, tmp_path: Path) -> None:
    assert text in _verified("-n", "2", str(SCRIPTS / "verified.py"), fault, folder=tmp_path, exit_code=code)


@pytest.mark.lane("launchers")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--steps", "0"], "Nothing would be compared. Received: steps=0"),
        (["-n", "1"], "One replica is one device. Received: num_replicas=1"),
        (["--strategy", "parameter-server"], "Unknown strategy."),
    ],
)
def test_options_that_cannot_be_used(options: list[str], text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfrep_strategy.cli", "verify", *options, str(SCRIPTS / "verified.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 2
    assert text in done.stderr
