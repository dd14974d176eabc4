"""The names that a run's strategy takes over keep their meaning otherwise."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.running.scope import run_strategy_scope

pytestmark = pytest.mark.lane("quick")


def test_settings_that_come_too_late_are_warnings(monkeypatch):
    tf.constant(0)  # TensorFlow runs from here on.
    monkeypatch.setenv("TFREP_STRATEGY", "multi-worker")
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    with run_strategy_scope(), pytest.warns(UserWarning, match="set_intra_op_parallelism_threads has no effect"):
        tf.config.threading.set_intra_op_parallelism_threads(threads + 1)
    with pytest.raises(RuntimeError, match="cannot be modified"):
        tf.config.threading.set_intra_op_parallelism_threads(threads + 1)
    assert tf.config.threading.get_intra_op_parallelism_threads() == threads


def test_replicators_take_the_strategy_of_the_run(monkeypatch):
    monkeypatch.setenv("TFREP_STRATEGY", "multi-worker")
    with run_strategy_scope() as strategy:
        assert tfrep.Replicator().strategy is strategy
