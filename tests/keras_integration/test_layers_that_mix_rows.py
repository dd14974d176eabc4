"""A model with Keras's own step whose layers mix the rows of a batch: nobody puts that right, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.synchronous.batch_sums import compares_rows

_MIXES = "A layer mixes the rows of a batch"


class _Own(keras.Model):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.hidden, self.norm, self.out = function, layers.Dense(6), layers.BatchNormalization(), layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.norm.build(shape)
        self.out.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.function(self.norm(self.hidden(x), training=training)))


def _functional(function: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(function(inputs)))


def _nested(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), _functional(function)])


def _as_lambda(function: Callable[[Any], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Lambda(function), layers.Dense(1)])


class _Product(_Own):
    """As keras.io's example of collaborative filtering, whose product of users and films is a sum over the batch, too."""

    def call(self, x: Any, training: bool = False) -> Any:
        return ops.sigmoid(ops.tensordot(self.hidden(x), self.norm(x, training=training), 2) + self.out(x))


def _fit(make: Callable[[Any], keras.Model], function: Callable[[Any], Any]) -> list[str]:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make(function)
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    return [str(each.message) for each in seen if _MIXES in str(each.message)]


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (_Own, lambda x: ops.cumsum(x, axis=0)),
        (_Own, lambda x: x - ops.roll(x, 1, axis=0)),
        (_Product, None),
        (_functional, lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x)),
        (_nested, lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x)),
        (_as_lambda, lambda x: ops.softmax(x, axis=0)),
    ],
    ids=["places of a router", "rows before", "product", "operations", "nested operations", "lambda"],
)
def test_it_is_told(make: Callable[[Any], keras.Model], function: Callable[[Any], Any]) -> None:
    assert _fit(make, function)


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (_Own, lambda x: x * ops.cumsum(x, axis=1) / ops.norm(x, axis=1, keepdims=True)),
        (_functional, lambda x: ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 3)), (0, 2, 1)), (-1, 6))),
        (_functional, lambda x: ops.reshape(layers.Dense(2)(ops.reshape(x, (-1, 2))), (-1, 6))),  # Windows.
        (_as_lambda, lambda x: x + tfrep.all_reduce(ops.sum(x, axis=0))),
    ],
    ids=["features", "operations", "windows", "reduced"],
)
def test_others_are_left_alone(make: Callable[[Any], keras.Model], function: Callable[[Any], Any]) -> None:
    assert not _fit(make, function)


class _Pooled(keras.Model):
    """Its step notes whether rows are compared by a pool behind something that normalizes them."""

    def __init__(self, normalize: Callable[[Any], Any]) -> None:
        super().__init__()
        self.normalize, self.pool, self.seen = normalize, layers.MaxPooling2D(), list[bool]()

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, _ = batch
        step: Any = current_step()
        self.seen.append(compares_rows(step, self.pool(ops.relu(self.normalize(x)))))
        return {"loss": ops.mean(x)}


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("by_layer", [True, False], ids=["a layer", "the user"])
def test_a_pool_behind_batch_normalization_takes_no_rows_of_others(by_layer: bool, synchronized: bool) -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        layer = layers.BatchNormalization(synchronized=synchronized)
        layer.build((None, 4, 4, 3))
        model = _Pooled((lambda x: layer(x, training=True)) if by_layer else (lambda x: x - ops.mean(x, axis=0)))
        model.compile("sgd")
    x = np.random.default_rng(0).normal(size=(7, 4, 4, 3)).astype("float32")
    model.fit(x, x[:, 0, 0], batch_size=4, verbose=0)
    assert set(model.seen) == {not by_layer}
