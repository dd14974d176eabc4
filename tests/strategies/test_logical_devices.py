"""Model parallelism on two replicas of two devices, against one device."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

CPUS = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def _device(tensor_or_variable):
    return tensor_or_variable.device.rpartition("device:")[2]


def _data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 6)).astype("float32"), rng.normal(size=(40, 1)).astype("float32")


class TwoParts(keras.Model):
    """Written for two logical devices; its first part on 0, its second on 1."""

    def __init__(self, strategy):
        super().__init__()
        initial = keras.initializers.GlorotUniform(seed=1)
        self.first = keras.layers.Dense(8, activation="tanh", kernel_initializer=initial)
        self.second = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
        self.first.build((None, 6))
        with strategy.logical_device_for_variables(1) if strategy else tfrep.logical_device(0):
            self.second.build((None, 8))
        self.on = 1 if strategy else 0
        self.seen = []

    def call(self, x):
        x = self.first(x)
        with tfrep.logical_device(self.on):
            y = self.second(x)
            self.seen.append(y.device)
            return y


def _functional(strategy):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="encoder", kernel_initializer=keras.initializers.GlorotUniform(1))(inputs)
    inner = keras.Sequential([keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))], name="decoder")
    return keras.Model(inputs, inner(x))


def _fit(model):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(*_data(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("build", [TwoParts, _functional], ids=["written for it", "placed by name"])
def test_fit_gives_the_weights_of_one_device(build):
    expected = _fit(build(None))
    strategy = tfrep.MirroredStrategy(
        CPUS, devices_per_replica=2, keras_layer_placement={"encoder": 0, "decoder": 1} if build is _functional else None
    )
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        model = build(strategy)
        weights = _fit(model)
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    first, second = model.weights[0].value, model.weights[2].value
    assert [_device(v) for v in first.values] == ["CPU:0", "CPU:2"]
    assert [_device(v) for v in second.values] == ["CPU:1", "CPU:3"]
    slots = [v for v in model.optimizer.variables if v.shape == model.weights[2].shape]
    assert slots
    assert all([_device(copy) for copy in v.value.values] == ["CPU:1", "CPU:3"] for v in slots)
    if build is TwoParts:
        assert {device.rpartition("device:")[2] for device in model.seen} >= {"CPU:1"}  # The step is traced for replica 0.


def test_own_loop_with_gradients():
    strategy = tfrep.MirroredStrategy(CPUS, devices_per_replica=2)
    with strategy.scope():
        a = tf.Variable([[2.0]])
        with strategy.logical_device_for_variables(1):
            b = tf.Variable([[3.0]])

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.matmul(x, a)
            with tfrep.logical_device(1):
                y = tf.matmul(y, b)
                devices.append(_device(y))
            loss = tf.reduce_sum(y)
        return tfrep.all_sum(tape.gradient(loss, [a, b]))

    devices = []
    x = strategy.experimental_distribute_values_from_function(lambda c: tf.constant([[1.0 + c.replica_id_in_sync_group]]))
    run = tf.function(lambda: strategy.run(step, (x,)), autograph=False)
    for gradient, expected in zip(run(), (9.0, 6.0), strict=True):
        assert [float(g[0, 0]) for g in strategy.experimental_local_results(gradient)] == [expected, expected]
    assert devices == ["CPU:1", "CPU:3"]


def test_a_name_that_no_layer_has():
    strategy = tfrep.MirroredStrategy(CPUS, devices_per_replica=2, keras_layer_placement={"encoder": 0, "decodr": 1})
    with strategy.scope():
        model = _functional(strategy)
        with pytest.warns(UserWarning, match=r"not been called. Received: \['decodr'\]"):
            _fit(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.evaluate(*_data(), verbose=0)


def test_bad_input():
    with refuses(devices=..., devices_per_replica=2):
        tfrep.MirroredStrategy(CPUS[:3], devices_per_replica=2)
    with refuses(told=["a replica has 1"], logical_device=1):
        tfrep.MirroredStrategy(CPUS[:2], keras_layer_placement={"encoder": 1})
    strategy = tfrep.MirroredStrategy(CPUS, devices_per_replica=2)
    with refuses(told=["a replica has 2"], logical_device=2), strategy.logical_device_for_variables(2):
        pass

    def step():
        with tfrep.logical_device(-1):
            return tf.ones([])

    with refuses(logical_device=-1, replica=0):
        strategy.run(tf.function(step))
    with tfrep.logical_device(0):
        assert float(tf.ones([])) == 1.0
    with refuses(told=["a replica has 1"], logical_device=1), tfrep.logical_device(1):
        pass
