"""The strategy "auto" of a run: that of `auto_strategy()` in a program that nobody has launched."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from calling import command

import tfrep_strategy as tfrep
from tfrep_strategy.processes.ranks import deferred_signals
from tfrep_strategy.running.runs import Options, run_to_end
from tfrep_strategy.running.scope import run_strategy_scope


def _described(strategy: Any) -> list[Any]:
    of_processes = isinstance(strategy, tfrep.MultiWorkerStrategy)
    return [type(strategy).__name__, strategy.num_replicas_in_sync, strategy.communicator.name if of_processes else None]


def in_run(result: str, cpus: str) -> None:
    tfrep.use_logical_cpus(int(cpus))
    with run_strategy_scope() as strategy:
        Path(result).write_text(json.dumps(_described(strategy)), "utf-8")


@pytest.mark.parametrize(
    ("num_replicas", "cpus", "expected"),
    [
        (None, 2, ["MirroredStrategy", 2, None]),
        (None, 1, ["MultiWorkerStrategy", 1, "single"]),
        (1, 2, ["MultiWorkerStrategy", 1, "single"]),
    ],
)
def test_one_process(num_replicas: int | None, cpus: int, expected: list[Any], tmp_path: Path) -> None:
    with deferred_signals() as events, tempfile.TemporaryDirectory() as notes:
        options = Options(num_replicas, log_dir=tmp_path / "logs", timeout=60)
        arguments = command(in_run, str(tmp_path / "result"), str(cpus))
        run_to_end(options, arguments, Path(notes), events)
    assert json.loads((tmp_path / "result").read_text("utf-8")) == expected


def test_a_program_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_STRATEGY", raising=False)
    assert _described(tfrep.auto_strategy.__wrapped__()) == ["MirroredStrategy", 4, None]  # This process has four logical CPUs.
    one = tf.config.list_logical_devices("CPU")[:1]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: one)
    assert _described(tfrep.auto_strategy.__wrapped__()) == ["MultiWorkerStrategy", 1, "single"]


def test_several_processes_are_the_replicas() -> None:
    assert Options(2).resolved_strategy == Options(hosts="a:2,b:2").resolved_strategy == "multi-worker"
    assert Options(2, strategy="mirrored").resolved_strategy == "mirrored"
