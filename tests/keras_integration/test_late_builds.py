"""Models that cannot be built from a description of their data: they need ragged or sparse rows, or rows that have values."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep

_DRAW = np.random.RandomState(0)
_Y = _DRAW.randn(19, 1).astype("float32")
_DENSE = (_DRAW.rand(19, 6) > 0.6).astype("float32")
_RAGGED = [_DRAW.randint(1, 9, n) for n in _DRAW.randint(1, 6, 19)]


class OfRagged(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = layers.Embedding(9, 4), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(tf.reduce_mean(self.embedding(x.to_tensor(shape=[None, 6])), axis=1))


class OfSparse(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(tf.ensure_shape(tf.sparse.to_dense(x), [None, 6]))


class OfValues(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        assert x.numpy().shape[1] == 6
        return self.last(x)


def _data(kind: type) -> tf.data.Dataset:
    x = tf.ragged.constant([each.tolist() for each in _RAGGED], dtype=tf.int64) if kind is OfRagged else _DENSE
    data = tf.data.Dataset.from_tensor_slices((x, _Y)).batch(6)
    return data.map(lambda x, y: (tf.sparse.from_dense(x), y)) if kind is OfSparse else data


def _results(kind: type, scope: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    with scope:
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=kind is OfValues)
    history = model.fit(_data(kind), epochs=2, verbose=0).history
    return [np.array([*history["loss"], *history["mae"]]), *model.get_weights()]


def of_a_process(strategy: Any, kind: type) -> list[np.ndarray]:
    return _results(kind, strategy.scope())


@pytest.mark.parametrize("kind", [OfRagged, OfSparse, OfValues])
def test_they_train_as_on_one_device(kind: type, worker_pool: Any) -> None:
    wanted = _results(kind, contextlib.nullcontext())
    mirrored = _results(kind, tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope())
    for found in (mirrored, *worker_pool("tf", 2).run(of_a_process, kind)):
        for mine, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=2e-5)


class Wrong(keras.Model):
    def call(self, x: Any) -> Any:
        raise KeyError("no such thing")


def test_what_is_wrong_with_a_model_is_told_when_it_is_traced() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Wrong()
        model.compile("sgd", "mse")
    with pytest.raises(KeyError, match="no such thing"):
        model.fit(_DENSE, _Y, verbose=0)
