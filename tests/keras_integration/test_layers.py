"""State of layers: moving statistics and random generators."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep


def moving_statistics(strategy: Any) -> dict[str, Any]:
    """Trains a plain BatchNormalization on one batch whose halves differ, and reads it in several ways."""
    x = np.concatenate([np.full((4, 1), 1.0), np.full((4, 1), 5.0)]).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.5, center=False, scale=False)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    return {
        "mean": float(model.layers[0].moving_mean.numpy()[0]),
        "variance": float(model.layers[0].moving_variance.numpy()[0]),
        "predict": [model.predict(x, batch_size=b, verbose=0).ravel().tolist() for b in (2, 8)],
        "weights": [w.tolist() for w in model.get_weights()],
    }


def sums_of_a_step(strategy: Any) -> list[int]:
    """Trains with two layers of synchronized statistics. Returns how many tensors each sum in the traced step has."""
    with strategy.scope():
        kinds = [layers.BatchNormalization(synchronized=True) for _ in range(2)]
        model = keras.Sequential([keras.Input((3,)), *kinds, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    all_reduce, sums = strategy.communicator.all_reduce, []

    def counted(tensors: Any, op: str = "sum") -> Any:
        if not tf.executing_eagerly():
            sums.append(len(tensors))
        return all_reduce(tensors, op)

    with mock.patch.object(strategy.communicator, "all_reduce", counted):
        model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=8, verbose=0)
    return sums


def test_synchronized_statistics_cost_one_sum_forward_and_two_backward(worker_pool: Any) -> None:
    statistics, of_first, of_others, loss, metric = 3, 2, 4, 1, 1
    for sums in worker_pool("tf", 2).run(sums_of_a_step):  # Gradients travel as soon as they are there.
        assert sums == [statistics + metric, statistics, 1 + loss + of_others, 1, of_first]


def test_moving_statistics_are_those_of_one_device(worker_pool: Any) -> None:
    results = [moving_statistics(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))]
    results += worker_pool("tf", 2).run(moving_statistics)
    results += worker_pool("horovod", 2).run(moving_statistics)
    for result in results:
        # The means of the halves are 1 and 5, and both variances 0; half of the old statistics (0 and 1) stay.
        np.testing.assert_allclose(result["mean"], 0.5 * np.mean([1.0, 5.0]))
        np.testing.assert_allclose(result["variance"], 0.5 + 0.5 * np.var([1.0, 5.0]))
        np.testing.assert_allclose(result["predict"][0], result["predict"][1])
    assert all(result["weights"] == results[0]["weights"] for result in results)


def statistics_of_uneven_batches(strategy: Any) -> dict[str, Any]:
    """Trains a plain BatchNormalization on batches of 4, 4 and 1 row."""
    x = np.random.RandomState(0).randn(9, 2).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
    gamma, beta, mean, variance, *others = model.get_weights()
    assert all(np.isfinite(w).all() for w in (gamma, beta, *others))
    return {"mean": mean, "variance": variance}


def test_moving_statistics_of_uneven_batches(worker_pool: Any) -> None:
    expected = statistics_of_uneven_batches(tf.distribute.get_strategy())
    results = [statistics_of_uneven_batches(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(n)])) for n in (2, 3)]
    for communicator in ("tf", "horovod"):
        results += worker_pool(communicator, 2).run(statistics_of_uneven_batches)
    for result in results:
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6)


def dropout_masks(strategy: Any) -> list[Any]:
    """Masks of two steps with two rows, from a fixed seed."""
    keras.utils.set_random_seed(11)

    class AlwaysDrop(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.drop = layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            return self.drop(x, training=True)

    with strategy.scope():
        inputs = keras.Input((64,))
        model = keras.Model(inputs, AlwaysDrop()(inputs))
    ones = np.ones((2, 64), "float32")
    return [(model.predict(ones, verbose=0) > 0).tolist() for _ in range(2)]


def test_dropout_is_that_of_one_device_and_follows_the_seed(worker_pool: Any) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    first, second = dropout_masks(strategy)
    assert first[0] != first[1]
    assert first != second
    assert dropout_masks(strategy) == [first, second]
    assert dropout_masks(tfrep.MirroredStrategy(["CPU:0"])) == [first, second]
    for communicator in ("tf", "horovod"):
        for masks in worker_pool(communicator, 2).run(dropout_masks):
            assert masks == [first, second], "processes draw what mirrored replicas draw"


@pytest.mark.lane("quick")
def test_weights_are_initialised_as_on_one_device() -> None:
    def build() -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(2)]).get_weights()

    expected = build()
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        found = build()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An array whose memory TensorFlow could share: it starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


@pytest.mark.lane("quick")
def test_nobodys_arrays_are_overwritten() -> None:
    x, y = aligned((16, 4)), aligned((16, 1))
    x[:], y[:] = np.random.RandomState(0).randn(16, 4), 1.0
    before = x.copy(), y.copy()
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(((x, y) for _ in range(8)), verbose=0)
    model.fit(x, y, verbose=0)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


@pytest.mark.lane("quick")
def test_scalar_variables_are_numbers() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        optimizer = keras.optimizers.SGD(0.25)
        plain = tf.Variable(3)
    assert int(optimizer.iterations) == 0
    assert float(optimizer.learning_rate) == 0.25
    assert list(range(5))[plain] == 3
