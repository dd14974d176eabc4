"""Losses that layers add while the replicas of a process take turns in the middle of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from lanes import in_lane, others_in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous.layers import LossesOfReplicas

X = np.random.RandomState(0).randn(29, 4).astype("float32")
Y = np.abs(X[:, :1]) + 1.0
WEIGHTED = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def _root_of_mean(y: Any, p: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - p)))


def _regularized(size: int = 3) -> Any:
    return layers.Dense(size, activity_regularizer="l2")


# What makes replicas meet comes between the added loss and its use: a loss of all rows, or statistics of all rows.
CASES: dict[str, tuple[Callable[[], list[Any]], Any, dict[str, Any]]] = {
    "weights of all": (lambda: [_regularized()], WEIGHTED, {"sample_weight": np.linspace(0.1, 2.0, 29)}),
    "dice": (lambda: [_regularized()], keras.losses.Dice(), {}),
    "a loss of the user's own": (lambda: [_regularized()], _root_of_mean, {}),
    "before statistics": (lambda: [_regularized(), layers.BatchNormalization(synchronized=True)], "mse", {}),
    "after statistics": (lambda: [layers.BatchNormalization(synchronized=True), _regularized()], "mse", {}),
    "twice": (lambda: [_regularized(), layers.BatchNormalization(synchronized=True), _regularized()], WEIGHTED, {}),
}


def _results(case: str, scope: Any) -> list[np.ndarray]:
    made, loss, options = CASES[case]
    keras.utils.set_random_seed(2)
    with scope:
        model = keras.Sequential([keras.Input((4,)), *made(), layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), loss)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options).history["loss"]
    return [np.array(history), np.array(model.evaluate(X, Y, batch_size=8, verbose=0, **options)), *model.get_weights()]


@pytest.mark.parametrize("replicas", [3, *in_lane("ragged", 2)])
@pytest.mark.parametrize("case", others_in_lane("ragged", CASES, "weights of all", "dice", "twice"))
def test_added_losses_are_those_of_one_device(case: str, replicas: int) -> None:
    found = _results(case, tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope())
    for mine, wanted in zip(found, _results(case, contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-5)


def test_each_replica_has_a_list_of_its_own() -> None:
    losses = LossesOfReplicas([0.5])
    assert losses[:] == [0.5]

    def replica() -> tf.Tensor:
        context: Any = tf.distribute.get_replica_context()
        losses.clear()
        losses.extend([context.replica_id_in_sync_group, 1])
        context.merge_call(lambda strategy: None)
        losses.append(2)
        return tf.stack([len(losses), *losses])

    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    found = strategy.experimental_local_results(strategy.run(tf.function(replica)))
    assert [each.numpy().tolist() for each in found] == [[3, 0, 1, 2], [3, 1, 1, 2]]


# Sums over rows behind statistics of all rows.


class SumOfSquares(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(x**2))
        return x


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - y)) / 8.0
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def _behind_statistics(scope: Any, own_step: bool) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    with scope:
        given = keras.Input((4,))
        normal = layers.BatchNormalization(synchronized=True)(given)
        made = layers.Dense(1)(normal if own_step else SumOfSquares()(layers.Dense(2)(normal)))
        model = (OwnStep if own_step else keras.Model)(given, made)
        model.compile(keras.optimizers.SGD(0.1), None if own_step else "mse")
    model.fit(X[:27], Y[:27], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def of_a_process(strategy: Any, own_step: bool) -> list[np.ndarray]:
    return _behind_statistics(strategy.scope(), own_step)


@pytest.mark.parametrize("own_step", [False, True])
def test_sums_behind_statistics_of_all_rows(own_step: bool, worker_pool: Any) -> None:
    wanted = _behind_statistics(contextlib.nullcontext(), own_step)
    mirrored = _behind_statistics(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), own_step)
    for found in (mirrored, *worker_pool("tf", 2).run(of_a_process, own_step)):
        for mine, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=2e-5)
