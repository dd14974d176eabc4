"""Keras's own train step, traced once and partitioned, gives every variable that one device gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import Together, own_rows

from tfrep_strategy.core.tf import trace
from tfrep_strategy.partitioner.placements import Shard
from tfrep_strategy.partitioner.step import Given, PartitionedStep

pytestmark = pytest.mark.lane("quick")

_ROWS, _STEPS = 7, 3
_K = keras.layers


def _pictures(*layers: Callable[[], Any]) -> Any:
    return keras.Sequential([keras.Input((12, 12, 1)), *(make() for make in layers)])


def _dense() -> Any:
    return _pictures(_K.Flatten, lambda: _K.Dense(16, "relu"), lambda: _K.Dropout(0.3), lambda: _K.Dense(10))


def _convolutions() -> Any:
    return _pictures(
        lambda: _K.Conv2D(8, 3, activation="relu"), _K.BatchNormalization, _K.MaxPooling2D, lambda: _K.Dropout(0.2),
        lambda: _K.Conv2D(8, 3, activation="gelu"), _K.GlobalAveragePooling2D, lambda: _K.Dense(10),
    )  # fmt: skip


def _separable() -> Any:
    return _pictures(
        lambda: _K.DepthwiseConv2D(3), lambda: _K.SeparableConv2D(4, 3), lambda: _K.GroupNormalization(2), _K.PReLU,
        lambda: _K.SpatialDropout2D(0.2), lambda: _K.GaussianNoise(0.1),
        _K.GlobalMaxPooling2D, _K.UnitNormalization, lambda: _K.Dense(10),
    )  # fmt: skip


def _u_shaped() -> Any:
    given = keras.Input((12, 12, 1))
    high = _K.Conv2D(4, 3, padding="same", activation="silu")(given)
    low = _K.Conv2D(8, 3, padding="same", activation="relu")(_K.MaxPooling2D()(high))
    joined = _K.Concatenate()([high, _K.Conv2DTranspose(4, 2, 2)(low)])
    return keras.Model(given, _K.Dense(10)(_K.Flatten()(_K.AveragePooling2D(2)(_K.UpSampling2D()(joined)))))


def _attention() -> Any:
    given = keras.Input((12, 12, 1))
    x = _K.Dense(16)(_K.Reshape((12, 12))(given))
    x = _K.LayerNormalization()(_K.MultiHeadAttention(2, 8)(x, x) + x)
    return keras.Model(given, _K.Dense(10)(_K.GlobalAveragePooling1D()(x)))


def _mixing() -> Any:
    class Smooth(_K.Layer):
        """Averages along the batch."""

        def call(self, x: Any) -> Any:
            return tf.transpose(tf.nn.conv1d(tf.transpose(x)[..., None], tf.ones([3, 1, 1]) / 3, 1, "SAME")[..., 0])

    return _pictures(_K.Flatten, lambda: _K.Dense(8), Smooth, lambda: _K.Dense(10))


def _spectrum() -> Any:
    class Spectrum(_K.Layer):
        """Adds the first frequency along the batch."""

        def call(self, x: Any) -> Any:
            return x + tf.abs(tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64)))[:, :1][:, 0]

    return _pictures(_K.Flatten, lambda: _K.Dense(8), Spectrum, lambda: _K.Dense(10))


def _recurrent() -> Any:
    return _pictures(lambda: _K.Reshape((12, 12)), lambda: _K.LSTM(8), lambda: _K.Dense(10))


_SGD = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
_MODELS: dict[str, tuple[Any, Any, int | None]] = {
    "dense, clipped": (_dense, lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1), 1),
    "dense, moving averages": (_dense, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2), 1),
    "dense, accumulated": (_dense, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), None),
    "dense, scaled loss": (
        _dense,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0, 2),
        None,
    ),
    "convolutions": (_convolutions, lambda: keras.optimizers.SGD(**_SGD), 3),
    "separable": (_separable, lambda: keras.optimizers.RMSprop(1e-3), 1),
    "u": (_u_shaped, lambda: keras.optimizers.SGD(**_SGD), 1),
    "attention": (_attention, lambda: keras.optimizers.SGD(**_SGD), 1),
    "mixing rows": (_mixing, lambda: keras.optimizers.SGD(0.1), None),
    "spectrum of rows": (_spectrum, lambda: keras.optimizers.SGD(0.1), None),
    "recurrent": (_recurrent, lambda: keras.optimizers.SGD(0.1), None),
}
"""A model, its optimizer, and how many rounds of sums a step has, where it sends nothing else."""


def _compiled(name: str) -> Any:
    make, optimizer, _ = _MODELS[name]
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    drawn = np.zeros((_ROWS, 12, 12, 1), "float32"), np.zeros(_ROWS, "int64")
    model._symbolic_build(data_batch=drawn)
    return model


def _variables(model: Any) -> dict[int, Any]:
    return {id(v): v for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", _MODELS)
def test_a_step_of_keras(name: str, replicas: int) -> None:
    drawn = np.random.default_rng(0)
    x = drawn.random((_STEPS, _ROWS, 12, 12, 1)).astype("float32")
    y = drawn.integers(0, 10, (_STEPS, _ROWS))
    specs = [tf.TensorSpec([None, 12, 12, 1]), tf.TensorSpec([None], tf.int64)]

    one = _compiled(name)
    step_of_one = tf.function(lambda *data: one.train_step(data), specs, autograph=False)
    several = _compiled(name)
    graph = trace("step", lambda *data: several.train_step(data), specs, {})
    captured = [outer for outer, _ in graph.captures]
    given = [*(Given(Shard(0)) for _ in specs), *(Given(is_shared=each.dtype == tf.resource) for each in captured)]
    step, transport = PartitionedStep(graph, given, replicas), Together(replicas)

    @tf.function(autograph=False)
    def step_of_several(*data: tf.Tensor) -> Any:
        counts = [_ROWS // replicas + (r < _ROWS % replicas) for r in range(replicas)]
        rows = own_rows([tf.constant(count) for count in counts], _ROWS)
        parts = [[t[sum(counts[:r]) : sum(counts[: r + 1])] for t in data] for r in range(replicas)]
        handles = [tf.compat.v1.get_default_graph().capture(each) for each in captured]
        results = step.run(rows, [[*part, *handles] for part in parts], transport)
        return [tf.nest.pack_sequence_as(graph.structured_outputs, own) for own in results]

    for batch in zip(x, y, strict=True):
        right, *_ = step_of_one(*batch), None
        for logs in step_of_several(*map(tf.constant, batch)):
            assert {k: float(v) for k, v in logs.items()} == pytest.approx({k: float(v) for k, v in right.items()}, rel=1e-5)
    for left, right_variable in zip(_variables(several).values(), _variables(one).values(), strict=True):
        np.testing.assert_allclose(left.numpy(), right_variable.numpy(), rtol=1e-5, atol=3e-6, err_msg=left.path)
    rounds = _MODELS[name][2]
    if rounds is not None:
        assert (transport.rounds, transport.gathers) == (rounds, 0)
        assert not step.without_rule
