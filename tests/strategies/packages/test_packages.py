"""Searches and trackers in processes, with the real packages: decisions, files and reports are the chief's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from scripts_of_packages import SCRIPTS, of_ranks, results, run

pytestmark = pytest.mark.lane("packages")


@pytest.mark.parametrize("seed", ["seeded", "without a seed"])
def test_searches_of_keras_tuner(tmp_path: Path, seed: str) -> None:
    pytest.importorskip("keras_tuner")
    chief, other = of_ranks(tmp_path, "tuners.py", seed)
    assert chief == other
    for units, _, score, scores in chief:
        assert units in (2, 4, 6)
        assert score == pytest.approx(scores[0], rel=1e-5), "the model is that of the best trial"
    assert chief[:3] == chief[3:], "the projects are found again"
    if seed == "seeded":
        alone = tmp_path / "alone"
        alone.mkdir()
        (expected,) = results(run(alone, str(SCRIPTS / "tuners.py"), seed).stdout)
        assert [each[:2] for each in chief] == [each[:2] for each in expected]
        for own, of_one in zip(chief, expected, strict=True):
            np.testing.assert_allclose([own[2], *own[3]], [of_one[2], *of_one[3]], rtol=1e-4)


@pytest.mark.parametrize("storage", ["memory", "url", "object"])
def test_studies_of_optuna(tmp_path: Path, storage: str) -> None:
    pytest.importorskip("optuna")
    chief, other = of_ranks(tmp_path, "studies.py", storage)
    assert chief == other
    study, brief = chief
    assert len(study) == (5 if storage == "memory" else 6)
    assert [number for number, *_ in brief] == [*range(len(brief))]
    assert {state for _, state, *_ in study} <= {"COMPLETE", "PRUNED"}


def test_a_trial_that_fails_on_all_ranks_is_a_failed_trial(tmp_path: Path) -> None:
    """Their errors say it in other words."""
    pytest.importorskip("optuna")
    chief, other = of_ranks(tmp_path, "studies.py", "fails on all")
    assert chief == other
    assert [state for _, state, *_ in chief[0]].count("FAIL") == 1


def test_a_trial_that_fails_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = str(SCRIPTS / "studies.py")
    done = run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", script, "fails on one")
    told = done.stderr + (tmp_path / "logs" / "rank1.log").read_text("utf-8")
    assert done.returncode == 1
    assert "OSError: this rank has no disk" in told


def test_a_randomized_search_of_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    chief, other = of_ranks(tmp_path, "randomized.py")
    assert chief == other


def test_runs_are_reported_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    (seen, mode, is_apart), (_, mode_of_other, other_is_apart) = of_ranks(tmp_path, "tracks_runs.py")
    assert (seen, mode, is_apart) == (2, None, False)
    assert (mode_of_other, other_is_apart) == ("disabled", True)
    assert len([*(tmp_path / "wandb").glob("offline-run-*")]) == 1
    assert not [*Path(tempfile.gettempdir()).glob("tfrep-mlflow-*")]


@pytest.mark.parametrize(("package", "error"), [("wandb", "UsageError"), ("mlflow", "MlflowException")])
def test_a_tracker_that_cannot_log_in(package: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with the tracker's own error; ranks that report nothing do not wait."""
    pytest.importorskip(package)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    own = {"HOME": str(tmp_path), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    script = str(SCRIPTS / "cannot_report.py")
    done = run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", script, package)
    assert done.returncode == 1
    assert f"{error}: " in done.stderr
    assert "Rank 0 failed" in done.stderr
