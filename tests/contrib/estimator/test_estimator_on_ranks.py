"""Estimators on two processes, over both transports, and under `tfrep run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from estimator_programs import ALL, global_batches, one_device

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ

pytestmark = pytest.mark.lane("migration")

_COMMUNICATORS = pytest.mark.parametrize("communicator", ["tf", "horovod"])
_STEPS = {"input_fn": global_batches([ALL], 2), "input_fn_of_process": global_batches([ALL[0::2], ALL[1::2]])}


def train(strategy: Any, folder: str, kind: str) -> dict[str, Any]:
    import estimator_programs

    return estimator_programs.train_through_estimator(strategy, folder, kind)


@_COMMUNICATORS
@pytest.mark.parametrize("kind", ["input_fn", "input_fn_of_process"])
def test_each_rank_takes_a_batch_of_its_own(communicator: str, kind: str, tmp_path: Path, worker_pool: Any) -> None:
    import estimator_programs

    expected = one_device(_STEPS[kind])
    for found in worker_pool(communicator, 2).run(train, str(tmp_path), kind):
        estimator_programs.check_equal(found, expected)
        events = [name for name in found["in_model_dir"] if name.startswith("events.")]
        assert len(events) == 1, "the chief writes summaries"
        saved = [name for name in found["in_model_dir"] if name.endswith(".index")]
        assert saved == [f"model.ckpt-{step}.index" for step in (0, 2, 4, 6)]


def in_other_ways(strategy: Any, folder: str) -> dict[str, Any]:
    import estimator_programs as programs

    config = tfrep.estimator.RunConfig(
        train_distribute=strategy,
        eval_distribute=strategy,
        save_checkpoints_secs=0.01,
        keep_checkpoint_max=2,
        tf_random_seed=None,
    )
    estimator = tfrep.estimator.model_to_estimator(programs.make_model(), config=config)
    spec = tfrep.estimator.TrainSpec(programs.shuffled_input_fn, max_steps=6)
    results, _ = tfrep.estimator.train_and_evaluate(estimator, spec, tfrep.estimator.EvalSpec(programs.input_fn, throttle_secs=0))
    # One rank has a hook for itself, which ends the training of all.
    stop = [programs.Records(8, lambda context: context.request_stop())] if strategy.rank == 1 else []
    estimator.train(programs.shuffled_input_fn, hooks=stop)
    return {
        "model_dir": estimator.model_dir,
        "results": results,
        "weights": estimator.get_variable_value("hidden/kernel"),
        "step": int(estimator.get_variable_value("global_step")),
        "export": estimator.export_saved_model(os.path.join(folder, "exports")),
        "losses": [value["loss"] for hook in stop for value in hook.values],
    }


@_COMMUNICATORS
def test_ranks_decide_alike(communicator: str, tmp_path: Path, worker_pool: Any) -> None:
    """Checkpoints by the clock, a seed that is drawn, a temporary folder, a hook on one rank."""
    first, second = worker_pool(communicator, 2).run(in_other_ways, str(tmp_path))
    for name in ("model_dir", "results", "step", "export"):
        assert first[name] == second[name], name
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert (first["step"], first["results"]["global_step"]) == (8, 6)
    assert len(second["losses"]) == 2
    assert os.listdir(tmp_path / "exports") == ["8"]


def fail_at_step_three(strategy: Any, folder: str, method: str) -> str:
    import estimator_programs as programs

    config = tfrep.estimator.RunConfig(folder, train_distribute=strategy, save_checkpoints_steps=2)
    estimator = tfrep.estimator.model_to_estimator(programs.make_model(), config=config)
    hook = programs.Records()

    def fail(context: Any, *values: Any) -> None:
        if context.session.global_step == 3 and strategy.rank == 1:
            raise ValueError("no more paper")

    setattr(hook, method, fail)
    try:
        estimator.train(programs.shuffled_input_fn, hooks=[hook])
    except tfrep.errors.HookError as error:
        again = estimator.train(programs.shuffled_input_fn, steps=1)  # The ranks are still together.
        return f"{error} ({os.path.basename(again.latest_checkpoint() or '')})"
    return "it went on"


def train_apart(strategy: Any, folder: str) -> str:
    import estimator_programs as programs

    estimator = tfrep.estimator.model_to_estimator(programs.make_model(), folder)
    try:
        estimator.train(programs.input_fn)
    except tfrep.errors.ConfigurationError as error:
        return str(error)
    return "it went on"


def test_ranks_do_not_train_apart(tmp_path: Path, worker_pool: Any) -> None:
    for found in worker_pool("tf", 2).run(train_apart, str(tmp_path)):
        assert found.startswith("Each rank would train by itself. Received: train_distribute=None, ranks=2\nHint: ")
    assert not list(tmp_path.iterdir())


@_COMMUNICATORS
@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_the_hook_of_one_rank_fails_on_all(communicator: str, method: str, tmp_path: Path, worker_pool: Any) -> None:
    found = worker_pool(communicator, 2).run(fail_at_step_three, str(tmp_path), method)
    text = f"On rank 1, Records.{method} raised ValueError at global step 3: no more paper (model.ckpt-3)"
    assert found == [text, text]


def test_a_run_that_is_started_again_goes_on_from_the_latest_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("scripts") / "killed_estimator.py"
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--max-restarts", "1"]
    environ = inherited_environ() | {"PYTHONPATH": str(Path(tfrep.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [*command, str(script), str(script.parents[1])],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [int(line.removeprefix("step ")) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert (tmp_path / "died").exists()
    assert steps in ([1, 2, 3, 4, 5, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8])  # The chief may not come to tell of step 5.
    assert "started again" in done.stderr
    assert sorted(path.name for path in (tmp_path / "model").glob("*.index")) == [f"model.ckpt-{n}.index" for n in (0, 2, 4, 6, 8)]
