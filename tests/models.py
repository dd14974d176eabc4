"""Small models of all kinds, each trained for a few steps: the conformance matrix, together with `scenarios.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from scenarios import SCENARIOS, dense, init, regression, run, trained

__all__ = ["MODELS", "run"]

MODELS: list[str] = []
_Rows = tuple[Any, Any]


def model(make: Callable[[], tuple[Any, _Rows]]) -> Callable[[], tuple[Any, _Rows]]:
    """Registers a function that returns a model and its data; the scenario trains it, if need be compiles it first."""

    def scenario() -> dict[str, Any]:
        built, (x, y) = make()
        if not built.compiled:
            built.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"])
        return trained(built, x, y, epochs=2, batch_size=8)

    name = f"model_{make.__name__}"
    SCENARIOS[name] = scenario
    MODELS.append(name)
    return make


class Seeds:
    """Initializers whose values do not depend on what else was made."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> keras.initializers.Initializer:
        self._next += 1
        return init(self._next)


def rows(*shape: int, n: int = 21, out: int = 1) -> _Rows:
    """Rows of the given shape, and targets; no number of replicas but one, three and seven divides their number."""
    rng = np.random.RandomState(0)
    return rng.randn(n, *shape).astype("float32"), rng.randn(n, out).astype("float32")


def words(length: int, vocabulary: int, n: int = 21) -> np.ndarray:
    """Sentences padded with zeros at their end."""
    rng = np.random.RandomState(1)
    x = rng.randint(1, vocabulary, (n, length))
    for row, end in enumerate(rng.randint(1, length + 1, n)):
        x[row, end:] = 0
    return x


# Pictures.


def _normalized(x: Any) -> Any:
    return layers.BatchNormalization(synchronized=True, momentum=0.7)(x)


@model
def residual() -> tuple[Any, _Rows]:
    seeds = Seeds()
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(inputs)
    for _ in range(2):
        y = layers.Activation("tanh")(_normalized(layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(x)))
        x = layers.Add()([x, _normalized(layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(y))])
    outputs = layers.Dense(1, kernel_initializer=seeds())(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), rows(6, 6, 2)


@model
def fine_tuned() -> tuple[Any, _Rows]:
    """A convolutional base that is frozen but for its last block, called in inference mode, under a new head."""
    seeds = Seeds()
    base = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(3, 3, activation="tanh", kernel_initializer=seeds()),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 3, activation="tanh", kernel_initializer=seeds()),
        ]
    )
    for layer in base.layers[:-1]:
        layer.trainable = False
    inputs = keras.Input((8, 8, 2))
    head = layers.Dense(1, kernel_initializer=seeds())(layers.Flatten()(base(inputs, training=False)))
    return keras.Model(inputs, head), rows(8, 8, 2)


@model
def encoder_decoder_with_skip() -> tuple[Any, _Rows]:
    seeds = Seeds()
    inputs = keras.Input((8, 8, 1))
    wide = layers.Conv2D(3, 3, padding="same", activation="tanh", kernel_initializer=seeds())(inputs)
    deep = layers.Conv2D(4, 3, strides=2, padding="same", activation="tanh", kernel_initializer=seeds())(wide)
    back = layers.Conv2DTranspose(3, 3, strides=2, padding="same", kernel_initializer=seeds())(deep)
    outputs = layers.Conv2D(1, 1, kernel_initializer=seeds())(layers.Concatenate()([wide, back]))
    x, _ = rows(8, 8, 1)
    return keras.Model(inputs, outputs), (x, np.tanh(x))


@model
def depthwise_separable() -> tuple[Any, _Rows]:
    seeds = Seeds()
    body = [
        keras.Input((6, 6, 2)),
        layers.SeparableConv2D(4, 3, depthwise_initializer=seeds(), pointwise_initializer=seeds()),
        layers.GroupNormalization(2),
        layers.DepthwiseConv2D(2, depthwise_initializer=seeds()),
        layers.GlobalMaxPooling2D(),
        layers.Dense(1, kernel_initializer=seeds()),
    ]
    return keras.Sequential(body), rows(6, 6, 2)


@model
def spectral_normalization() -> tuple[Any, _Rows]:
    """Keeps a vector that each training step moves on, and that is no gradient."""
    hidden = layers.Dense(5, "tanh", kernel_initializer=init(1))
    return keras.Sequential(
        [keras.Input((4,)), layers.SpectralNormalization(hidden), layers.Dense(1, kernel_initializer=init(2))]
    ), rows(4)


# Sequences.


@model
def bidirectional_with_mask() -> tuple[Any, _Rows]:
    seeds = Seeds()

    def gru(**kwargs: Any) -> Any:
        return layers.GRU(3, kernel_initializer=seeds(), recurrent_initializer=seeds(), **kwargs)

    body = [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(9, 3, mask_zero=True, embeddings_initializer=seeds()),
        layers.Bidirectional(gru(), backward_layer=gru(go_backwards=True)),
        layers.Dense(1, kernel_initializer=seeds()),
    ]
    return keras.Sequential(body), (words(5, 9), rows(1)[1])


@model
def time_distributed() -> tuple[Any, _Rows]:
    body = [
        keras.Input((4, 3)),
        layers.TimeDistributed(layers.Dense(3, "tanh", kernel_initializer=init(1))),
        layers.SimpleRNN(3, kernel_initializer=init(2), recurrent_initializer=init(3)),
        layers.Dense(1, kernel_initializer=init(4)),
    ]
    return keras.Sequential(body), rows(4, 3)


@model
def convolutional_recurrent() -> tuple[Any, _Rows]:
    body = [
        keras.Input((3, 5, 5, 1)),
        layers.ConvLSTM2D(2, 3, kernel_initializer=init(1), recurrent_initializer=init(2)),
        layers.Flatten(),
        layers.Dense(1, kernel_initializer=init(3)),
    ]
    return keras.Sequential(body), rows(3, 5, 5, 1)


@model
def causal_transformer() -> tuple[Any, _Rows]:
    """One block that predicts the next word; what pads a sentence counts neither in the loss nor in the accuracy."""
    seeds = Seeds()
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=seeds())(inputs)
    heads = layers.MultiHeadAttention(2, 2, kernel_initializer=seeds())(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(layers.Add()([x, heads]))
    wide = layers.Dense(8, "gelu", kernel_initializer=seeds())(x)
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(4, kernel_initializer=seeds())(wide)]))
    built = keras.Model(inputs, layers.Dense(9, kernel_initializer=seeds())(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    x = words(6, 9)
    return built, (x, np.roll(x, -1, axis=1))


@model
def tied_weights() -> tuple[Any, _Rows]:
    """An embedding that is read by row and, turned over, multiplies: its gradient is sparse and dense at once."""
    table = layers.ReversibleEmbedding(9, 4, embeddings_initializer=init(1))
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Dense(4, "tanh", kernel_initializer=init(2))(table(inputs))
    built = keras.Model(inputs, table(x, reverse=True))
    built.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = words(5, 9)
    return built, (x, x[:, ::-1])


# How models are put together.


@model
def siamese() -> tuple[Any, _Rows]:
    tower = dense(4, 3)
    a, b = keras.Input((4,)), keras.Input((4,))
    outputs = layers.Dense(1, kernel_initializer=init(3))(layers.Subtract()([tower(a), tower(b)]))
    x, y = rows(4)
    return keras.Model([a, b], outputs), ([x, x[::-1].copy()], y)


@model
def nested() -> tuple[Any, _Rows]:
    class Inner(keras.Model):
        def __init__(self, units: int, seed: int) -> None:
            super().__init__()
            self.hidden = layers.Dense(units, "tanh", kernel_initializer=init(seed))

        def call(self, x: Any) -> Any:
            return ops.concatenate([x, self.hidden(x)], axis=-1)

    return keras.Sequential([keras.Input((3,)), Inner(2, 1), Inner(3, 2), dense(8)]), rows(3)


@model
def autoencoder_with_add_loss() -> tuple[Any, _Rows]:
    """Its whole loss is its own, two terms of it; `compile` gets none."""

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layers.Dense(2, "tanh", kernel_initializer=init(1))
            self.decoder = layers.Dense(5, kernel_initializer=init(2))

        def call(self, x: Any) -> Any:
            code = self.encoder(x)
            found = self.decoder(code)
            self.add_loss(ops.mean(ops.square(found - x)))
            self.add_loss(0.1 * ops.mean(ops.sum(ops.abs(code), axis=-1)))
            return found

    built = Autoencoder()
    built.compile(keras.optimizers.Adam(0.02))
    return built, (rows(5)[0], None)


@model
def gated_mixture() -> tuple[Any, _Rows]:
    seeds = Seeds()
    inputs = keras.Input((4,))
    gates = layers.Dense(3, "softmax", kernel_initializer=seeds())(inputs)
    experts = layers.EinsumDense("bi,iej->bej", (3, 2), bias_axes="ej", kernel_initializer=seeds())(inputs)
    mixed = layers.Dot((1, 1))([gates, experts])
    return keras.Model(inputs, layers.Dense(1, kernel_initializer=seeds())(mixed)), rows(4)


@model
def low_rank_adaptation() -> tuple[Any, _Rows]:
    built = dense()
    built.layers[0].enable_lora(2, a_initializer=init(5), b_initializer=init(6))
    return built, rows(4)


@model
def adapted_preprocessing() -> tuple[Any, _Rows]:
    """Layers that learn from data before training: scaling, and an index of numbers."""
    x, y = rows(4)
    scaled = layers.Normalization()
    scaled.adapt(3 * x + 1)
    index = layers.IntegerLookup(output_mode="multi_hot")
    kinds = words(3, 7)
    index.adapt(kinds)
    a, b = keras.Input((4,)), keras.Input((3,), dtype="int64")
    joined = layers.Concatenate()([scaled(a), index(b)])
    return keras.Model([a, b], layers.Dense(1, kernel_initializer=init(1))(joined)), ([3 * x + 1, kinds], y)


@model
def unit_normalized_metric_learning() -> tuple[Any, _Rows]:
    """A loss class of one's own, and cosine similarity as a metric."""

    class Margin(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.relu(0.9 - ops.sum(y_true * y_pred, axis=-1))

    built = keras.Sequential([keras.Input((4,)), layers.Dense(3, kernel_initializer=init(1)), layers.UnitNormalization()])
    built.compile(keras.optimizers.SGD(0.1), Margin(), metrics=[keras.metrics.CosineSimilarity(name="cosine")])
    x, y = rows(4, out=3)
    return built, (x, y / np.linalg.norm(y, axis=1, keepdims=True))


@model
def quantile_heads() -> tuple[Any, _Rows]:
    """A loss function per output, with weights, and outputs of different rank."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, "tanh", kernel_initializer=init(1))(inputs)
    low = layers.Dense(1, kernel_initializer=init(2), name="low")(hidden)
    grid = layers.Reshape((2, 2), name="grid")(layers.Dense(4, kernel_initializer=init(3))(hidden))

    def pinball(y_true: Any, y_pred: Any) -> Any:
        error = y_true - y_pred
        return ops.mean(ops.maximum(0.1 * error, -0.9 * error), axis=-1)

    built = keras.Model(inputs, {"low": low, "grid": grid})
    built.compile(keras.optimizers.RMSprop(0.01), {"low": pinball, "grid": "huber"}, loss_weights={"low": 2.0, "grid": 0.3})
    x, y = regression(21)
    return built, (x, {"low": y, "grid": np.reshape(x, (-1, 2, 2))})
