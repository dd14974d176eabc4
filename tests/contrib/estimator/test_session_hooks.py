"""Hooks: when they are called, what they are told, and what happens if one fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from estimator_programs import Records, estimator_in, input_fn, steps_saved, two
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import HookError

pytestmark = pytest.mark.lane("quick")


class TimeHistory:
    """The hook of an article, which derives from nothing here."""

    def begin(self) -> None:
        self.times: list[float] = []

    def before_run(self, run_context: Any) -> None:
        self.iter_time_start = time.time()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        assert run_values.results is None
        self.times.append(time.time() - self.iter_time_start)


def test_a_hook_with_some_methods_only(tmp_path: Path) -> None:
    history = TimeHistory()
    estimator = estimator_in(tmp_path, train_distribute=two()).train(input_fn, hooks=[history])
    assert len(history.times) == 6
    assert min(history.times) > 0
    estimator.evaluate(input_fn, hooks=[history])
    assert len(history.times) == 11


def test_the_order_of_calls(tmp_path: Path) -> None:
    hook = Records()
    estimator_in(tmp_path).train(input_fn, hooks=[hook], steps=2)
    assert hook.calls == ["begin", "after_create_session", *["before_run", "after_run"] * 2, "end"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_stops_the_training(replicas: int, tmp_path: Path) -> None:
    hook = Records(2, lambda context: context.request_stop())
    estimator = estimator_in(tmp_path, train_distribute=two() if replicas == 2 else None).train(input_fn, hooks=[hook])
    assert estimator.evaluate(input_fn)["global_step"] == 2
    assert hook.calls[-1] == "end"
    stop = tfrep.estimator.StopAtStepHook(num_steps=3)
    assert estimator.train(input_fn, hooks=[stop]).evaluate(input_fn)["global_step"] == 5


def fails(context: Any) -> None:
    raise ValueError("no more paper")


def test_a_hook_that_fails(tmp_path: Path) -> None:
    hook, other = Records(3, fails), Records()
    estimator = estimator_in(tmp_path, save_checkpoints_steps=2)
    with refuses(HookError, told=["Records.after_run", "ValueError", "global step 3", "no more paper"]) as caught:
        estimator.train(input_fn, hooks=[hook, other])
    assert isinstance(caught.value.__cause__, ValueError)
    assert hook.calls[-1] == "after_run"
    assert len(other.values) == 2
    assert steps_saved(tmp_path) == [0, 2], "nothing is saved after the error"
    assert estimator.evaluate(input_fn)["global_step"] == 2


@pytest.mark.parametrize("method", ["begin", "before_run", "end"])
def test_any_method_may_fail(method: str, tmp_path: Path) -> None:
    hook = Records()
    setattr(hook, method, lambda *args: fails(None))
    with refuses(HookError, told=[f"Records.{method}", "ValueError", "global step"]):
        estimator_in(tmp_path).train(input_fn, hooks=[hook], steps=2)


def test_a_hook_that_asks_for_what_there_is_not(tmp_path: Path) -> None:
    hook = Records()
    hook.before_run = lambda context: tfrep.estimator.SessionRunArgs(["loss", "speed"])  # type: ignore[method-assign]
    with refuses(HookError, hint="ask for one of ['global_step', 'loss', 'mae']", fetches="speed"):
        estimator_in(tmp_path).train(input_fn, hooks=[hook])


def test_there_is_no_session(tmp_path: Path) -> None:
    hook = Records(1, lambda context: context.session.run("weights"))
    with refuses(HookError, told=["no attribute 'run'"], hint="there is no session"):
        estimator_in(tmp_path).train(input_fn, hooks=[hook])
