"""What a run tells of itself beside its logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep
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


def test_the_end_of_a_run_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert events.how_it_went(path, 75.2) == events.how_it_went(None, 75.2) == "done in 1 min 15 s"
    told = events.Events(path)
    told.tell("start")
    told.tell("fit", seconds=100.0, examples=7, data_wait=1.0)
    told.tell("restart")  # What was done before may be done again.
    told.tell("fit", seconds=3.0, examples=5000, data_wait=0.0)
    told.tell("fit", seconds=1.0, examples=3000, data_wait=0.5)
    assert events.how_it_went(path, 9.96) == "done in 10.0 s; fit: 2,000 examples/s, 12 % of the time waiting for data"
    path.write_text(path.read_text("utf-8") + '{"time": 1.0, "ev', "utf-8")  # The disk was full.
    assert events.how_it_went(path, 7322.0).startswith("done in 2 h 2 min; fit: 2,000 examples/s")


@pytest.mark.parametrize(
    ("replicas", "variables", "speaks"),
    [(2, {}, True), (1, {}, False), (2, {"TFREP_QUIET": "1"}, False), (2, {"TFREP_RESTARTS": "0"}, False)],
)
def test_a_strategy_says_what_it_is_once(
    replicas: int, variables: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "_has_said", False)
    for name in ("TFREP_QUIET", "TFREP_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        strategy = tfrep.MirroredStrategy([f"CPU:{replica}" for replica in range(replicas)])
    assert strategy.num_replicas_in_sync == replicas
    assert capsys.readouterr().err == ("tfrep: 2 replicas in this process (CPU)\n" if speaks else "")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_a_fit_of_a_run_is_measured(replicas: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its first step, which is compiled, and without validation. It is what it is without a launcher."""
    x = np.arange(60.0, dtype="float32").reshape(30, 2) / 60.0

    def batches() -> Iterator[tuple[Any, Any]]:
        for begin in (0, 10, 20) * 2:
            yield x[begin : begin + 10], x[begin : begin + 10, :1]

    weights, path = [], tmp_path / "events.jsonl"
    for is_measured in (False, True):
        monkeypatch.delenv("TFREP_QUIET", raising=False)
        monkeypatch.setenv(events.VARIABLE, str(path) if is_measured else "")
        keras.utils.set_random_seed(1)
        with tfrep.MirroredStrategy([f"CPU:{replica}" for replica in range(replicas)]).scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = {"x": x, "y": x[:, :1], "batch_size": 10} if kind == "arrays" else {"x": batches(), "steps_per_epoch": 3}
        history = model.fit(**data, epochs=2, verbose=0, validation_data=(x, x[:, :1]))
        assert sorted(history.history) == ["loss", "val_loss"]
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)
    (fit,) = [each for each in map(json.loads, path.read_text("utf-8").splitlines()) if each["event"] == "fit"]
    assert (fit["steps"], fit["examples"]) == (5, 50)
    assert fit["seconds"] > 0
    assert 0 <= fit["data_wait"] <= 1


def test_a_file_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events.Events(tmp_path / "gone" / "events.jsonl").tell("start")
    monkeypatch.delenv(events.VARIABLE, raising=False)
    events.of_run().tell("step")
    assert not [*tmp_path.iterdir()]
