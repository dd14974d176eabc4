"""Which steps a user wants to be traced, and where the traces go; and what is refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from raising import refuses

from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.profiles.requests import (
    TracedSteps,
    new_run_folder,
    profile_environ,
    profile_folder,
    steps_of_environment,
    traced_steps,
)

pytestmark = pytest.mark.lane("quick")

BAD_STEPS = ["0", "20:10", "10:10", "abc", "-3", "1:2:3", ":5", "5:", "", "1.5", "10001", "٣", "9" * 10]


@pytest.mark.parametrize(
    ("given", "steps"), [("1", (5, 6)), ("10", (5, 15)), ("0:1", (0, 1)), ("10:20", (10, 20)), ("7:10007", (7, 10007))]
)
def test_steps(given: str, steps: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced_steps(given) == TracedSteps(*steps)
    monkeypatch.setenv("TFREP_PROFILE", given)
    assert steps_of_environment() == TracedSteps(*steps)
    assert "TFREP_PROFILE" not in inherited_environ()  # A run inside of this one profiles nothing.


@pytest.mark.parametrize("given", BAD_STEPS)
@pytest.mark.parametrize("strategy", ["auto", "mirrored", "parameter-server"])
def test_bad_steps(
    given: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["--strategy", strategy, "--profile", given], tmp_path, monkeypatch, capsys)
    assert f"Received: profile='{given}'\nHint: " in said


@pytest.mark.parametrize("folder", ["script.py/traces", "/proc"])
@pytest.mark.parametrize("strategy", ["mirrored", "parameter-server"])
def test_a_folder_that_cannot_be_written(
    folder: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--strategy", strategy, "--profile", "10", "--profile-dir", folder]
    said = refused(arguments, tmp_path, monkeypatch, capsys)
    assert f"Received: profile_dir='{Path(folder).absolute()}'\nHint: name another one." in said


def refused(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what `tfrep run` says to arguments that it refuses."""
    from tfrep_strategy.cli import main

    (folder / "script.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["tfrep", "run", *arguments, "script.py"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf"])
def test_bad_seconds(seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tfrep_strategy.cli import main

    monkeypatch.setattr(sys, "argv", ["tfrep", "profile", str(os.getpid()), "--seconds", seconds])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert f"Received: seconds={float(seconds)!r}\nHint: e.g. 2." in capsys.readouterr().err


def test_bad_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_PROFILE", "soon")
    with refuses(TFREP_PROFILE="soon"):
        steps_of_environment()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFREP_PROFILE_DIR", raising=False)
    assert profile_folder(None) == tmp_path / "tfrep-profile"
    assert profile_folder(None, "logs") == tmp_path / "logs" / "profile"
    assert profile_folder("mine", "logs") == tmp_path / "mine"
    monkeypatch.setenv("TFREP_PROFILE_DIR", "set")
    assert profile_folder(None) == tmp_path / "set"
    assert profile_environ(None, tmp_path / "mine") == {}
    assert not (tmp_path / "mine").exists()
    assert profile_environ("3", tmp_path / "mine") == {"TFREP_PROFILE": "3", "TFREP_PROFILE_DIR": str(tmp_path / "mine")}
    assert list((tmp_path / "mine").iterdir()) == []


def test_each_profile_has_a_folder_of_its_own(tmp_path: Path) -> None:
    found = set()
    for _ in range(3):
        folder = new_run_folder(tmp_path)
        assert folder.parent == tmp_path / "plugins" / "profile"
        folder.mkdir(parents=True)
        found.add(folder)
    assert len(found) == 3
