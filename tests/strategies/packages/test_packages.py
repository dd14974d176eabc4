"""Searches and trackers in processes, with the real packages: decisions, files and reports are the chief's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfrep_strategy

pytestmark = pytest.mark.lane("packages")

_SCRIPTS = Path(__file__).with_name("scripts")
_EXAMPLES = Path(__file__).parents[3] / "examples"
_ROOT = str(Path(tfrep_strategy.__file__).parents[1])


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    kept = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=kept | own, capture_output=True, text=True, timeout=280, check=False
    )


def _results(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]


def _of_ranks(folder: Path, script: str, *arguments: str) -> list[Any]:
    """Returns what each of two ranks has printed."""
    done = _run(folder, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", str(_SCRIPTS / script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return _results(done.stdout) + _results((folder / "logs" / "rank1.log").read_text("utf-8"))


@pytest.mark.parametrize("seed", ["seeded", "without a seed"])
def test_searches_of_keras_tuner(tmp_path: Path, seed: str) -> None:
    pytest.importorskip("keras_tuner")
    chief, other = _of_ranks(tmp_path, "tuners.py", seed)
    assert chief == other
    for units, _, score, scores in chief:
        assert units in (2, 4, 6)
        assert score == pytest.approx(scores[0], rel=1e-5), "the model is that of the best trial"
    assert chief[:3] == chief[3:], "the projects are found again"
    if seed == "seeded":
        alone = tmp_path / "alone"
        alone.mkdir()
        (expected,) = _results(_run(alone, str(_SCRIPTS / "tuners.py"), seed).stdout)
        assert [each[:2] for each in chief] == [each[:2] for each in expected]
        for own, of_one in zip(chief, expected, strict=True):
            np.testing.assert_allclose([own[2], *own[3]], [of_one[2], *of_one[3]], rtol=1e-4)


@pytest.mark.parametrize("storage", ["memory", "url", "object"])
def test_studies_of_optuna(tmp_path: Path, storage: str) -> None:
    pytest.importorskip("optuna")
    chief, other = _of_ranks(tmp_path, "studies.py", storage)
    assert chief == other
    study, brief = chief
    assert len(study) == (5 if storage == "memory" else 6)
    assert [number for number, *_ in brief] == [*range(len(brief))]
    assert {state for _, state, *_ in study} <= {"COMPLETE", "PRUNED"}


def test_a_trial_that_fails_on_all_ranks_is_a_failed_trial(tmp_path: Path) -> None:
    """Their errors say it in other words."""
    pytest.importorskip("optuna")
    chief, other = _of_ranks(tmp_path, "studies.py", "fails on all")
    assert chief == other
    assert [state for _, state, *_ in chief[0]].count("FAIL") == 1


def test_a_trial_that_fails_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = str(_SCRIPTS / "studies.py")
    done = _run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", script, "fails on one")
    told = done.stderr + (tmp_path / "logs" / "rank1.log").read_text("utf-8")
    assert done.returncode == 1
    assert "OSError: this rank has no disk" in told


@pytest.mark.parametrize("package", ["keras_hub", "keras_rs", "scikeras", "bayesflow"])
def test_models_of_packages(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    (expected,) = _results(_run(tmp_path, str(_SCRIPTS / "built_with.py"), package).stdout)
    for found in _of_ranks(tmp_path, "built_with.py", package):
        for own, of_one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, of_one, rtol=1e-4)


def test_the_example_of_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("keras_hub")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    example = [str(_EXAMPLES / "gpt2_lora.py"), "--preset", "none", "--texts", "64", "--epochs", "2"]
    found = []
    for command in (example, ["-m", "tfrep_strategy.cli", "run", "-n", "2", *example]):
        done = _run(tmp_path, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one_device, replicas = found
    assert replicas["trained"] == one_device["trained"]
    for name, values in one_device["history"].items():
        np.testing.assert_allclose(replicas["history"][name], values, rtol=1e-4)


def test_a_randomized_search_of_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    chief, other = _of_ranks(tmp_path, "randomized.py")
    assert chief == other


def test_runs_are_reported_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    (seen, mode, is_apart), (_, mode_of_other, other_is_apart) = _of_ranks(tmp_path, "tracks_runs.py")
    assert (seen, mode, is_apart) == (2, None, False)
    assert (mode_of_other, other_is_apart) == ("disabled", True)
    assert len([*(tmp_path / "wandb").glob("offline-run-*")]) == 1
    assert not [*Path(tempfile.gettempdir()).glob("tfrep-mlflow-*")]
