"""The conformance matrix: small models of pictures and sequences, each trained for a few steps, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from scenarios.base import SCENARIOS, init, trained

Rows = tuple[Any, Any]


def model(make: Callable[[], tuple[Any, Rows]]) -> Callable[[], tuple[Any, Rows]]:
    """Registers a function that returns a model and its data; the scenario trains it, if need be compiles it first."""

    def scenario() -> dict[str, Any]:
        built, (x, y) = make()
        if not built.compiled:
            built.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"])
        return trained(built, x, y, epochs=2, batch_size=8)

    SCENARIOS[f"model_{make.__name__}"] = scenario
    return make


class Seeds:
    """Initializers whose values do not depend on what else was made."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> keras.initializers.Initializer:
        self._next += 1
        return init(self._next)


def rows(*shape: int, n: int = 21, out: int = 1) -> Rows:
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
def residual() -> tuple[Any, Rows]:
    seeds = Seeds()
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(inputs)
    for _ in range(2):
        y = layers.Activation("tanh")(_normalized(layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(x)))
        x = layers.Add()([x, _normalized(layers.Conv2D(4, 3, padding="same", kernel_initializer=seeds())(y))])
    outputs = layers.Dense(1, kernel_initializer=seeds())(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), rows(6, 6, 2)


@model
def fine_tuned() -> tuple[Any, Rows]:
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
def encoder_decoder_with_skip() -> tuple[Any, Rows]:
    seeds = Seeds()
    inputs = keras.Input((8, 8, 1))
    wide = layers.Conv2D(3, 3, padding="same", activation="tanh", kernel_initializer=seeds())(inputs)
    deep = layers.Conv2D(4, 3, strides=2, padding="same", activation="tanh", kernel_initializer=seeds())(wide)
    back = layers.Conv2DTranspose(3, 3, strides=2, padding="same", kernel_initializer=seeds())(deep)
    outputs = layers.Conv2D(1, 1, kernel_initializer=seeds())(layers.Concatenate()([wide, back]))
    x, _ = rows(8, 8, 1)
    return keras.Model(inputs, outputs), (x, np.tanh(x))


@model
def depthwise_separable() -> tuple[Any, Rows]:
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
def spectral_normalization() -> tuple[Any, Rows]:
    """Keeps a vector that each training step moves on, and that is no gradient."""
    hidden = layers.Dense(5, "tanh", kernel_initializer=init(1))
    return keras.Sequential(
        [keras.Input((4,)), layers.SpectralNormalization(hidden), layers.Dense(1, kernel_initializer=init(2))]
    ), rows(4)


@model
def volumetric() -> tuple[Any, Rows]:
    seeds = Seeds()
    body = [
        keras.Input((4, 4, 4, 1)),
        layers.Conv3D(3, 2, activation="tanh", kernel_initializer=seeds()),
        layers.LayerNormalization(),
        layers.AveragePooling3D(2),
        layers.Flatten(),
        layers.Dense(1, kernel_initializer=seeds()),
    ]
    return keras.Sequential(body), rows(4, 4, 4, 1)


@model
def application() -> tuple[Any, Rows]:
    """A network of `keras.applications`: its head is trained first, then all but its statistics."""
    base = keras.applications.MobileNet((32, 32, 3), alpha=0.25, include_top=False, weights=None)
    for layer in base.layers:
        layer.trainable = False
    inputs = keras.Input((16, 16, 3))
    x = layers.Resizing(32, 32)(layers.Rescaling(0.5)(inputs))
    pooled = layers.GlobalAveragePooling2D()(base(x, training=False))
    built = keras.Model(inputs, layers.Dense(1, kernel_initializer=init(1))(pooled))
    built.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = rows(16, 16, 3)
    built.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for layer in base.layers:
        layer.trainable = not isinstance(layer, layers.BatchNormalization)
    built.compile(keras.optimizers.SGD(0.01), "mse")
    return built, (x, y)


# Sequences.


@model
def bidirectional_with_mask() -> tuple[Any, Rows]:
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
def time_distributed() -> tuple[Any, Rows]:
    body = [
        keras.Input((4, 3)),
        layers.TimeDistributed(layers.Dense(3, "tanh", kernel_initializer=init(1))),
        layers.SimpleRNN(3, kernel_initializer=init(2), recurrent_initializer=init(3)),
        layers.Dense(1, kernel_initializer=init(4)),
    ]
    return keras.Sequential(body), rows(4, 3)


@model
def convolutional_recurrent() -> tuple[Any, Rows]:
    body = [
        keras.Input((3, 5, 5, 1)),
        layers.ConvLSTM2D(2, 3, kernel_initializer=init(1), recurrent_initializer=init(2)),
        layers.Flatten(),
        layers.Dense(1, kernel_initializer=init(3)),
    ]
    return keras.Sequential(body), rows(3, 5, 5, 1)


@model
def causal_transformer() -> tuple[Any, Rows]:
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
def tied_weights() -> tuple[Any, Rows]:
    """An embedding that is read by row and, turned over, multiplies: its gradient is sparse and dense at once."""
    table = layers.ReversibleEmbedding(9, 4, embeddings_initializer=init(1))
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Dense(4, "tanh", kernel_initializer=init(2))(table(inputs))
    built = keras.Model(inputs, table(x, reverse=True))
    built.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = words(5, 9)
    return built, (x, x[:, ::-1])


@model
def translator() -> tuple[Any, Rows]:
    """An encoder whose last state starts the decoder, which looks back at the encoder's outputs; both are masked."""
    seeds = Seeds()

    def embedded(tokens: Any) -> Any:
        return layers.Embedding(9, 3, mask_zero=True, embeddings_initializer=seeds())(tokens)

    def lstm(**kwargs: Any) -> Any:
        return layers.LSTM(3, return_sequences=True, kernel_initializer=seeds(), recurrent_initializer=seeds(), **kwargs)

    source, target = keras.Input((5,), dtype="int32"), keras.Input((4,), dtype="int32")
    encoded, *state = lstm(return_state=True)(embedded(source))
    decoded = lstm()(embedded(target), initial_state=state)
    seen = layers.Attention(use_scale=True)([decoded, encoded])
    weighed = layers.AdditiveAttention()([decoded, encoded])
    logits = layers.Dense(9, kernel_initializer=seeds())(layers.Concatenate()([decoded, seen, weighed]))
    built = keras.Model([source, target], logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["accuracy"])
    y = words(4, 9)
    return built, ([words(5, 9), y], np.roll(y, -1, axis=1))


@model
def cells_of_ones_own() -> tuple[Any, Rows]:
    class Leaky(keras.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.state_size = 3
            self.mixing = layers.Dense(3, "tanh", kernel_initializer=init(4))

        def call(self, x: Any, states: Any) -> Any:
            state = 0.8 * states[0] + 0.2 * self.mixing(ops.concatenate([x, states[0]], axis=-1))
            return state, [state]

    gru = layers.GRUCell(2, kernel_initializer=init(1), recurrent_initializer=init(2))
    body = [keras.Input((4, 3)), layers.RNN([gru, Leaky()]), layers.Dense(1, kernel_initializer=init(3))]
    return keras.Sequential(body), rows(4, 3)


@model
def dilated_causal() -> tuple[Any, Rows]:
    seeds = Seeds()
    body = [
        keras.Input((8, 2)),
        layers.Conv1D(3, 2, padding="causal", kernel_initializer=seeds()),
        layers.PReLU(alpha_initializer=seeds(), shared_axes=[1]),
        layers.Conv1D(3, 2, dilation_rate=2, padding="causal", activation="tanh", kernel_initializer=seeds()),
        layers.AveragePooling1D(2),
        layers.UpSampling1D(3),
        layers.Cropping1D((1, 2)),
        layers.Conv1D(1, 3, kernel_initializer=seeds()),
        layers.GlobalAveragePooling1D(),
    ]
    return keras.Sequential(body), rows(8, 2)
