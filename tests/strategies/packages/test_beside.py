"""Packages beyond the extra `test`, in processes. `nox -s packages` installs them; without one its test is skipped."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scripts_of_packages import SCRIPTS, of_ranks, results, run

pytestmark = pytest.mark.lane("packages")

_EXAMPLES = Path(__file__).parents[3] / "examples"


def _needs(package: str) -> None:
    """Skips a test without importing the package, which may change Keras or start threads in this process."""
    if not find_spec(package):
        pytest.skip(f"{package} is not installed: nox -s packages")


@pytest.mark.parametrize(
    "package", ["keras_hub", "keras_hub_layouts", "keras_rs", "scikeras", "bayesflow", "shap", "tensorflow_datasets"]
)
def test_models_of_packages(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs(package.removesuffix("_layouts"))
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    (expected,) = results(run(tmp_path, str(SCRIPTS / "built_with.py"), package).stdout)
    for found in of_ranks(tmp_path, "built_with.py", package):
        for own, of_one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, of_one, rtol=1e-4)


def test_layouts_on_a_mesh_of_two_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs("keras_hub")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    script = [str(SCRIPTS / "built_with.py"), "keras_hub_layouts"]
    (expected,) = results(run(tmp_path, *script).stdout)
    done = run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "4", "--strategy", "mirrored", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = results(done.stdout)
    for own, of_one in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, of_one, rtol=1e-4)


@pytest.mark.parametrize(
    ("package", "runs", "own"),
    [
        ("comet_ml", "reported/*.zip", {}),
        ("neptune", ".neptune/offline/*", {}),
        ("neptune_scale", "reported/*", {}),
        ("neptune_scale", "reported/*", {"NEPTUNE_MODE": "offline"}),
    ],
    ids=["comet", "neptune", "neptune_scale", "a setting of the user"],
)
def test_switches_of_trackers(
    package: str, runs: str, own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks make no run, whose script goes on, unless the user has set the variable."""
    _needs(package)
    for variable in ("NEPTUNE_MODE", "COMET_AUTO_LOG_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, mode in own.items():
        monkeypatch.setenv(variable, mode)
    (losses, *of_chief), (others, *of_other) = of_ranks(tmp_path, "tracks_elsewhere.py", package)
    assert losses == others
    assert of_chief == [own.get("NEPTUNE_MODE"), None]
    assert of_other == [own.get("NEPTUNE_MODE", "debug"), "true"]
    assert len([*tmp_path.glob(runs)]) == 1 + len(own)


def test_the_example_of_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs("keras_hub")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    example = [str(_EXAMPLES / "gpt2_lora.py"), "--preset", "none", "--texts", "64", "--epochs", "2"]
    found = []
    for command in (example, ["-m", "tfrep_strategy.cli", "run", "-n", "2", *example]):
        done = run(tmp_path, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one_device, replicas = found
    assert replicas["trained"] == one_device["trained"]
    for name, values in one_device["history"].items():
        np.testing.assert_allclose(replicas["history"][name], values, rtol=1e-4)
