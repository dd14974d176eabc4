"""What a run tells of itself beside its logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfrep_strategy.cluster import events
from tfrep_strategy.cluster.identity import inherited_environ

pytestmark = pytest.mark.lane("quick")


def test_steps_are_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    now = [100.0]
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    steps = events.Steps(fit=2)
    for done in range(25):
        steps.note(done)
        now[0] += 1.0
    told = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(each["event"], each["fit"], each["step"]) for each in told] == [("step", 2, done) for done in (0, 10, 20)]
    assert all(each["time"] > 1e9 for each in told)


def test_a_run_inside_of_a_run_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.VARIABLE, "of the outer run")
    assert events.VARIABLE not in inherited_environ()


def test_a_file_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events.Events(tmp_path / "gone" / "events.jsonl").tell("start")
    monkeypatch.delenv(events.VARIABLE, raising=False)
    events.of_run().tell("step")
    assert not [*tmp_path.iterdir()]
