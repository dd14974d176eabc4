"""`batch_statistics="replica"`: each replica normalizes its rows by their own mean and variance, and waits for no other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

_ROWS = np.random.default_rng(0).normal(size=(19, 6, 6, 3)).astype("float32")
"""The last batch has three rows, so one of two replicas has one."""
_REPLICAS = 2


class _OfParts(keras.layers.Layer):
    """Batch normalization of one device that takes its statistics from parts of the batch.

    Args:
        axis: That of the channels.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.of_part = [keras.layers.BatchNormalization(axis, center=False, scale=False) for _ in range(_REPLICAS)]

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=(shape[self.axis],), initializer="ones")
        self.beta = self.add_weight(shape=(shape[self.axis],), initializer="zeros")
        for each in self.of_part:
            each.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        half = (tf.shape(x)[0] + 1) // 2
        parts = [each(part, training=training) for each, part in zip(self.of_part, (x[:half], x[half:]), strict=True)]
        shape = [1] * len(x.shape)
        shape[self.axis] = -1
        return tf.concat(parts, 0) * tf.reshape(self.gamma, shape) + tf.reshape(self.beta, shape)


def _trained(normalization: Any, axis: int) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(4, 3, padding="same", use_bias=False), normalization(axis), keras.layers.ReLU()]
    model = keras.Sequential([keras.Input((6, 6, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, model.fit(_ROWS, _ROWS[:, 0, 0, 0], batch_size=8, epochs=2, shuffle=False, verbose=0)


@pytest.mark.parametrize("axis", [-1, 1])
def test_each_replica_has_its_statistics(axis: int) -> None:
    one, wanted = _trained(_OfParts, axis)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], batch_statistics="replica")
    with strategy.scope():
        model, history = _trained(keras.layers.BatchNormalization, axis)
    assert history.history["loss"] == pytest.approx(wanted.history["loss"], rel=1e-5)
    of_parts, own = one.layers[1], model.layers[1]
    for name in ("gamma", "beta"):
        np.testing.assert_allclose(getattr(own, name), getattr(of_parts, name), rtol=1e-4, atol=1e-6, err_msg=name)
    for name in ("moving_mean", "moving_variance"):  # Read as their means.
        mean = np.mean([getattr(each, name).numpy() for each in of_parts.of_part], 0)
        np.testing.assert_allclose(getattr(own, name), mean, rtol=1e-4, atol=1e-6, err_msg=name)
    rounds = [line for line in strategy.explain(model).splitlines() if "Round" in line]
    assert len(rounds) == 1, rounds  # Gradients, the loss, and metrics.


@pytest.mark.parametrize("kind", ["masked", "synchronized"])
def test_entries_that_are_masked_and_layers_that_ask_for_all_rows(kind: str) -> None:
    rows = np.where(np.random.default_rng(1).uniform(size=(8, 5, 1)) > 0.3, _ROWS[:8, :5, 0], 0.0)

    def model() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5, 3))
        x = keras.layers.Masking()(inputs)
        x = keras.layers.BatchNormalization(synchronized=kind == "synchronized")(x)
        result = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x)))
        result.compile("sgd", "mse")
        return result

    def losses(given: Any) -> list[float]:
        return given.fit(*data, batch_size=len(data[0]), epochs=3, shuffle=False, verbose=0).history["loss"]

    twice = kind == "masked"
    part = rows[:4] if twice else rows  # Two replicas with the same rows have the statistics of one.
    data = np.concatenate([part, part]) if twice else rows, np.ones(8, "float32")
    wanted = losses(model())
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"], batch_statistics="replica").scope():
        assert losses(model()) == pytest.approx(wanted, rel=1e-5)


def test_other_values_are_refused() -> None:
    with refuses(batch_statistics="own"):
        tfrep.MirroredStrategy(["CPU:0"], batch_statistics="own")
