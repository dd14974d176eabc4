"""Layers that mix the rows of a batch, in models with Keras's own step: as on one device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfrep_strategy as tfrep

_MIXES = "cannot be split among replicas"
_X = np.random.default_rng(0).normal(size=(11, 6)).astype("float32")


class OwnModel(keras.Model):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.hidden, self.out = function, layers.Dense(6), layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.out.build(shape)

    def call(self, x: Any) -> Any:
        return self.out(self.function(self.hidden(x)))


def _functional(function: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(function(inputs)))


def _nested(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), _functional(function)])


def _as_lambda(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Lambda(function), layers.Dense(1)])


def _as_activation(function: Callable[[Any], Any]) -> keras.Model:
    hidden = layers.SpectralNormalization(layers.Dense(6, activation=function))
    return keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)])


def _behind_softmax_of_rows(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Softmax(axis=0), layers.Dense(1, activation=function)])


class Deviations:
    """A function that is an object."""

    def __call__(self, x: Any) -> Any:
        return x / (0.1 + ops.std(x, axis=0))


class ProductModel(OwnModel):
    """As keras.io's example of collaborative filtering, whose product of users and films is a sum over the batch, too."""

    def call(self, x: Any) -> Any:
        return ops.sigmoid(ops.tensordot(self.hidden(x), self.function(x), 2) + self.out(x))


class DroppedModel(OwnModel):
    """Draws for each row, and changes nothing by that."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(function)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        mixed = self.function(self.hidden(x))
        return self.out(mixed + 0.0 * keras.random.dropout(mixed, 0.5, seed=self.seed_generator))


def _places(x: Any) -> Any:
    """As a router counts, of each of three experts, the rows that come before."""
    chosen = ops.one_hot(ops.argmax(x[:, :3], -1), 3)
    places = ops.cumsum(chosen, axis=0) * chosen
    return x * ops.cast(ops.sum(places, -1, keepdims=True) <= 2, "float32")


_MIXING = {
    "sums before": (OwnModel, lambda x: ops.tanh(ops.cumsum(x, axis=0))),
    "rows before": (OwnModel, lambda x: x - ops.roll(x, 1, axis=0)),
    "places of a router": (OwnModel, _places),
    "product": (ProductModel, lambda x: x),
    "operations": (_functional, lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)),
    "nested operations": (_nested, lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)),
    "lambda": (_as_lambda, lambda x: ops.softmax(x, axis=0)),
    "activation": (_as_activation, lambda x: ops.softmax(x, axis=0)),
    "activation that is an object": (_as_activation, Deviations()),
    "softmax of rows": (_behind_softmax_of_rows, ops.tanh),
    "rows less their mean": (OwnModel, lambda x: x - ops.mean(x, axis=0)),
    "deviation beside": (OwnModel, lambda x: ops.concatenate([x[:, 1:], 0 * x[:, :1] + ops.std(x)], 1)),
    "drawn after": (DroppedModel, lambda x: ops.sort(x, axis=0)),
    "numbers by place": (OwnModel, lambda x: x + keras.random.normal(ops.shape(x), seed=11)),
    "numbers by place, of a stateless operation": (OwnModel, lambda x: x * tf.random.stateless_uniform(tf.shape(x), [3, 4])),
    "silu after": (OwnModel, lambda x: ops.silu(ops.cumsum(x, axis=0))),
    "sizes after": (OwnModel, lambda x: ops.reshape(ops.reshape(ops.cumsum(x, 0), (ops.shape(x)[0] * 2, 3)), (ops.shape(x)[0], 6))),
}


def _trained(
    scope: Any,
    make: Callable[[Any], keras.Model],
    function: Any,
    drop_remainder: bool = False,
    warning: str = _MIXES,
    **settings: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Returns what came out, and the warnings that have these words: by default, that all rows are computed everywhere."""
    keras.utils.set_random_seed(5)
    with scope:
        model = make(function)
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()], **settings)
    data = tf.data.Dataset.from_tensor_slices((_X, _X[:, :1])).batch(4, drop_remainder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = {"history": model.fit(data, epochs=2, validation_data=data, verbose=0).history}
        found |= {"evaluate": model.evaluate(data, verbose=0), "predict": model.predict(data, verbose=0)}
        found |= {"of one batch": model.predict_on_batch(_X[:3]), "weights": model.get_weights()}
    return found, [str(each.message) for each in seen if warning in str(each.message)]


def _check(*given: Any, **settings: Any) -> list[str]:
    expected, _ = _trained(contextlib.nullcontext(), *given, **settings)
    found, told = _trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), *given, **settings)
    keras.tree.map_structure(lambda f, e: np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-6), found, expected)
    return told


@pytest.mark.parametrize(("make", "function"), _MIXING.values(), ids=_MIXING)
def test_it_is_what_one_device_gives(make: Callable[[Any], keras.Model], function: Callable[[Any], Any]) -> None:
    _check(make, function)


@pytest.mark.parametrize(
    "settings", [{"drop_remainder": True}, {"steps_per_execution": 3}, {"jit_compile": True}], ids=["one size", "several", "XLA"]
)
def test_settings(settings: dict[str, Any]) -> None:
    _check(OwnModel, _places, **settings)


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (OwnModel, lambda x: ops.cumsum(x, axis=1) / ops.norm(x, axis=1, keepdims=True)),
        (_functional, lambda x: ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 3)), (0, 2, 1)), (-1, 6))),
        (_as_activation, lambda x: x * ops.sigmoid(x)),
        (_functional, lambda x: ops.reshape(layers.Dense(2)(ops.reshape(x, (-1, 2))), (-1, 6))),  # Windows.
        (DroppedModel, ops.tanh),
        (OwnModel, lambda x: x + 0.0 * keras.random.normal(ops.shape(x))),
        (OwnModel, lambda x: x + 0.0 * keras.random.normal(ops.shape(x)[1:], seed=11)),
    ],
    ids=["features", "operations", "activation", "windows", "own numbers", "numbers without a seed", "one number for all"],
)
def test_others_are_left_alone(make: Callable[[Any], keras.Model], function: Callable[[Any], Any]) -> None:
    assert not _check(make, function)


def _in_a_loop(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Reshape((3, 2)), layers.Lambda(function), layers.GRU(3), layers.Dense(1)])


@tf.custom_gradient
def _reversed_on_the_way_back(x: Any) -> Any:
    return tf.identity(x), lambda gradient: -gradient / tf.norm(gradient + 1e-3, axis=-1, keepdims=True)


def _computed_again(x: Any) -> Any:
    return tf.recompute_grad(lambda z: ops.tanh(2.0 * z))(x)


@pytest.mark.parametrize("function", [ops.silu, _reversed_on_the_way_back, _computed_again])
def test_gradients_of_each_row_are_left_alone(function: Callable[[Any], Any]) -> None:
    expected, _ = _trained(contextlib.nullcontext(), _in_a_loop, function)
    found, told = _trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), _in_a_loop, function, warning=_MIXES)
    keras.tree.map_structure(lambda f, e: np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-6), found, expected)
    assert not told


@pytest.mark.parametrize("settings", [{}, {"drop_remainder": True}, {"steps_per_execution": 3}, {"jit_compile": True}], ids=str)
def test_a_loop_behind_mixed_rows(settings: dict[str, Any]) -> None:
    given: Any = _in_a_loop, lambda x: x - ops.mean(x, 0)
    expected, _ = _trained(contextlib.nullcontext(), *given, **settings)
    found, told = _trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), *given, warning=_MIXES, **settings)
    keras.tree.map_structure(lambda f, e: np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-6), found, expected)
    assert not told


def test_sums_that_a_layer_asks_of_all_replicas_are_left_alone() -> None:
    scope = tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
    _, told = _trained(scope, _as_lambda, lambda x: x + tfrep.all_reduce(ops.sum(x, axis=0)))
    assert not told


def test_a_predict_step_that_mixes_rows_gives_those_of_one_device() -> None:
    class Ranks(OwnModel):
        def predict_step(self, x: Any) -> Any:
            scores = self(x, training=False)
            return {"scores": scores, "ranks": ops.argsort(ops.argsort(scores, axis=0), axis=0)}

    def predicted(scope: Any) -> Any:
        keras.utils.set_random_seed(5)
        with scope:
            model = Ranks(lambda x: x)
            model.build((None, 6))
            model.compile()
        return model.predict(_X, batch_size=4, verbose=0)

    found, expected = predicted(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope()), predicted(contextlib.nullcontext())
    keras.tree.map_structure(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-6), found, expected)
