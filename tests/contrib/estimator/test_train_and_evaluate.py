"""Evaluations during a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from estimator_programs import ALL, Records, estimator_in, global_batches, input_fn, one_device, scalars, two

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("migration")


def test_evaluations_during_the_training(tmp_path: Path) -> None:
    """They do not disturb it, and the data does not begin again."""
    hook = Records()
    both = two()
    estimator = estimator_in(tmp_path, train_distribute=both, eval_distribute=both, save_checkpoints_steps=2)
    train_spec = tfrep.estimator.TrainSpec(input_fn, max_steps=5, hooks=[hook])
    eval_spec = tfrep.estimator.EvalSpec(input_fn, steps=None, throttle_secs=0)
    results, exports = tfrep.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    expected = one_device(global_batches([ALL], 2)[:5])
    np.testing.assert_allclose([value["loss"] for value in hook.values], expected["losses"], rtol=1e-5)
    assert results == pytest.approx(expected["results"] | {"global_step": 5}, rel=1e-5)
    assert list(scalars(tmp_path / "eval", "loss")) == [2, 4, 5]
    assert exports == []


def test_evaluations_are_throttled(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path, save_checkpoints_steps=2)
    train_spec = tfrep.estimator.TrainSpec(input_fn)
    tfrep.estimator.train_and_evaluate(estimator, train_spec, tfrep.estimator.EvalSpec(input_fn))
    assert list(scalars(tmp_path / "eval", "loss")) == [11]
