"""`tfrep.DatasetCreator` under no strategy and under every one that needs no cluster of its own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

X = np.random.RandomState(0).randn(64, 4).astype("float32")
Y = X[:, :1] * 2.0


def _dataset(context: Any) -> tf.data.Dataset:
    batch = context.get_per_replica_batch_size(16)
    return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(batch)


def _model() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _expected() -> Any:
    model = _model()
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(16), epochs=2, steps_per_epoch=4, verbose=0)
    return model


def test_without_a_strategy() -> None:
    model = _model()
    history = model.fit(tfrep.DatasetCreator(_dataset), epochs=2, steps_per_epoch=4, verbose=0).history
    assert len(history["loss"]) == 2
    np.testing.assert_allclose(model.get_weights()[0], _expected().get_weights()[0], rtol=1e-6)
    assert np.isfinite(model.evaluate(tfrep.DatasetCreator(_dataset), steps=2, verbose=0))
    finite = tfrep.DatasetCreator(lambda context: tf.data.Dataset.from_tensor_slices(X).batch(8))
    assert model.predict(finite, verbose=0).shape == (64, 1)


def test_under_a_synchronous_strategy() -> None:
    with tfrep.MirroredStrategy(["CPU:0"]).scope():
        model = _model()
    model.fit(tfrep.DatasetCreator(_dataset), epochs=2, steps_per_epoch=4, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], _expected().get_weights()[0], rtol=1e-6)


def test_class_weights_under_a_synchronous_strategy() -> None:
    creator = tfrep.DatasetCreator(
        lambda context: tf.data.Dataset.from_tensors((tf.ones([4, 4]), tf.constant([0, 0, 1, 1]))).repeat()
    )
    with tfrep.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
    history = model.fit(creator, steps_per_epoch=2, class_weight={0: 1.0, 1: 3.0}, verbose=0).history
    assert history["loss"][0] == pytest.approx(2.0 * np.log(2.0), rel=1e-5)


def test_input_options_are_kept() -> None:
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    assert tfrep.DatasetCreator(_dataset, options).input_options is options


def test_it_is_where_keras_2_had_it() -> None:
    assert keras.utils.experimental.DatasetCreator is tfrep.DatasetCreator
    assert tf.keras.utils.experimental.DatasetCreator is tfrep.DatasetCreator


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), "must be a `callable`. Received: 3"),
        ((lambda: None,), "must take one argument"),
        ((lambda one, two: None,), "must take one argument"),
        ((_dataset, "options"), "must be a `tf.distribute.InputOptions`. Received: 'options'"),
    ],
)
def test_bad_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        tfrep.DatasetCreator(*arguments)


def test_a_function_that_returns_no_dataset() -> None:
    with pytest.raises(TypeError, match=r"must return a `tf.data.Dataset`. Received: \[1\]"):
        _model().fit(tfrep.DatasetCreator(lambda context: [1]), steps_per_epoch=1, verbose=0)
