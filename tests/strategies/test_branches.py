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
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"different branches.*choices of the replicas.*\[0 1\]"):
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


class Steps(keras.Model):
    """Does in a step what a function says, with the errors of the rows and gradients of their mean."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.layer, self.does = keras.layers.Dense(1, kernel_initializer="zeros"), does
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.pair = tf.Variable([0.0, 0.0], trainable=False)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            loss = tf.reduce_mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.does(self, x, errors, lambda: self.optimizer.apply(gradients, self.trainable_variables) or tf.constant(0.0))
        return {"loss": loss}


def fitted(does: Any) -> Steps:
    """Fits, on two replicas of one process, a batch of four rows, of which the last two have larger errors."""
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Steps(does)
        model.compile(keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((np.ones([4, 2], "float32"), np.float32([[1], [1], [2], [2]])))
    model.fit(data.batch(4, drop_remainder=True), verbose=0)
    return model


def nothing() -> Any:
    return tf.constant(0.0)


def test_a_step_that_needs_the_number_of_rows_decides_by_all_of_them() -> None:
    def does(limit: float) -> Any:
        def decide(model: Any, x: Any, errors: Any, update: Any) -> None:
            loss = tf.reduce_mean(errors) + tf.reduce_sum(tf.zeros([int(x.shape[0])]))  # The step needs this number.
            tf.cond(loss > limit, update, nothing)

        return decide

    assert np.all(fitted(does(2.0)).layer.kernel.numpy() > 0)  # The mean of the errors is 2.5.
    assert np.all(fitted(does(0.5)).layer.kernel.numpy() > 0)
    assert np.all(fitted(does(9.0)).layer.kernel.numpy() == 0)


def test_a_replica_without_chosen_rows_assigns_nothing_computed_from_them() -> None:
    def does(model: Any, x: Any, errors: Any, update: Any) -> None:
        chosen = tf.cast(errors > 2.0, tf.float32)
        mean = tf.reduce_sum(errors * chosen) / tf.reduce_sum(chosen)
        tf.cond(tf.reduce_sum(chosen) > 0, lambda: model.state.assign(mean), nothing)

    assert np.isfinite(fitted(does).state.numpy())


def test_a_slice_is_an_update() -> None:
    def does(model: Any, x: Any, errors: Any, update: Any) -> None:
        pair = model.pair
        tf.cond(tf.reduce_mean(errors) > 2.0, lambda: pair[0].assign(pair[0] + 1.0), lambda: pair.read_value())

    copies = fitted(does).pair.values
    assert [copy.numpy().tolist() for copy in copies] == [[1.0, 0.0]] * 2
