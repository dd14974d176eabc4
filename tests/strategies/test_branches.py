"""Branches with updates and collectives. Steps that Keras drives are in `scenarios/own_steps.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep


def numbers(strategy: Any, values: list[float]) -> Any:
    """One number for each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def loop_that_decides_by_itself(strategy: Any) -> tuple[Any, Any]:
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(x: Any, decided: Any) -> Any:
        def update() -> Any:
            optimizer.apply([x], [weight])
            return tf.constant(True)

        return tf.cond(decided(x), update, lambda: tf.constant(False))

    def run(values: list[float], decided: Any) -> None:
        tf.function(lambda x: strategy.run(step, (x, decided)), autograph=False)(numbers(strategy, values))

    return weight, run


def test_replicas_that_decide_apart_are_told() -> None:
    weight, run = loop_that_decides_by_itself(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"different branches.*\n?.*decided.*\[0 1\]"):
        run([-1.0, 2.0], lambda x: x > 0)
    run([1.0, 2.0], lambda x: x > 0)
    np.testing.assert_allclose(weight.numpy(), 1.0 - 3.0)
    run([-1.0, 2.0], lambda x: tfrep.all_reduce(x, "mean") > 0)
    np.testing.assert_allclose(weight.numpy(), -2.0 - 1.0)


def test_what_changes_nothing_is_decided_by_each_replica() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x: Any) -> Any:
        tf.debugging.assert_less(x, 10.0)
        return tf.cond(x > 0, lambda: 2.0 * x, lambda: 0.0)

    traced = tf.function(lambda x: strategy.run(step, (x,)), autograph=False).get_concrete_function(numbers(strategy, [0.0, 0.0]))
    assert not [op.name for op in traced.graph.get_operations() if "Concat" in op.type or "Collective" in op.type]
    values = strategy.experimental_local_results(traced(numbers(strategy, [-1.0, 2.0])))
    assert [float(value) for value in values] == [0.0, 4.0]
