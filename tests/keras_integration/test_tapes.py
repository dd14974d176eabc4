"""What a tape in a step of the user's own costs, where it leaves gradients alone, and half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

ROWS = 20
BATCH = 10
LOSS_SCALE = 2.0**10


class Net(keras.Model):
    """Takes gradients by a function of the model, the rows and their targets."""

    def __init__(self, take: Callable[..., Any]) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.RandomUniform(seed=1))
        self.out = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomUniform(seed=2))
        self.take = take

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(x), tf.float32) - y))
            loss_of_step = self.optimizer.scale_loss(loss)
        gradients = self.take(tape.gradient(loss_of_step, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class NetOfKeras(Net):
    train_step = keras.Model.train_step


class CallsKeras(Net):
    def train_step(self, batch: Any) -> Any:
        return super(Net, self).train_step(batch)


def as_they_are(gradients: Any) -> Any:
    return gradients


def clipped(gradients: Any) -> Any:
    return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]


def trained(kind: type[Net], take: Callable[..., Any], optimizer: Any, **settings: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    x = np.random.RandomState(0).randn(ROWS, 3).astype("float32")
    model = kind(take)
    model(x[:1])
    model.compile(optimizer(), "mse", **settings)
    model.fit(x, x.sum(1, keepdims=True), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def mirrored(num_replicas: int, **settings: Any) -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)], **settings)


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def test_a_step_that_passes_gradients_on_has_the_bits_of_keras() -> None:
    with mirrored(3).scope():
        own, of_keras = (trained(kind, as_they_are, sgd) for kind in (CallsKeras, NetOfKeras))
    for found, expected in zip(own, of_keras, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("take", [as_they_are, clipped])
def test_sharded_state(take: Any) -> None:
    def adam() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(0.05)

    expected = trained(Net, take, adam)
    with mirrored(3, shard_optimizer_state=True).scope():
        found = trained(Net, take, adam)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": True}])
def test_ways_to_run(settings: Any) -> None:
    expected = trained(Net, clipped, sgd, **settings)
    with mirrored(3).scope():
        found = trained(Net, clipped, sgd, **settings)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def clipped_while_scaled(gradients: Any) -> Any:
    return [tf.clip_by_norm(gradient, 0.1 * LOSS_SCALE) for gradient in gradients]


@pytest.mark.parametrize("take", [as_they_are, clipped_while_scaled])
def test_half_precision(take: Any) -> None:
    keras.config.set_dtype_policy("mixed_float16")

    def scaled() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=LOSS_SCALE)

    try:
        expected = trained(Net, take, scaled)
        with mirrored(3).scope():
            found = trained(Net, take, scaled)
    finally:
        keras.config.set_dtype_policy("float32")
    start = Net(take)
    start(np.zeros((1, 3), "float32"))
    assert not np.allclose(expected[0], start.get_weights()[0], atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=5e-3)


def test_a_loop_of_ones_own_keeps_the_gradient_of_its_replica() -> None:
    """As under TensorFlow's own strategies."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(1.0)

    def step() -> Any:
        weight = tf.cast(tfrep.replica_id() + 1, tf.float32)
        with tf.GradientTape() as tape:
            loss = weight * variable
        return tape.gradient(loss, variable)

    found = strategy.experimental_local_results(strategy.run(tf.function(step)))
    assert [float(gradient) for gradient in found] == [1.0, 2.0]
