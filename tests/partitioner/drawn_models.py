"""Draws small programs: a model of Keras's layers and of layers that mix rows, a loss, metrics, an optimizer, and data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops

O = keras.optimizers  # noqa: E741


def _rows(x: Any) -> Any:
    return tf.shape(x)[0]


def _loop(x: Any, rounds: int, body: Callable[[Any], Any]) -> Any:
    return tf.while_loop(lambda i, h: i < rounds, lambda i, h: (i + 1, body(h)), (0, x))[1]


def _two_views(x: Any) -> Any:
    both = tf.tanh(tf.concat([x, 0.5 - x], 0) * 0.9)
    return both[: _rows(x)] * both[_rows(x) :]


def _of_segments(x: Any) -> Any:
    numbers = tf.cast(x[:, 0] > 0, tf.int32) + tf.cast(x[:, 1] > 0, tf.int32)
    highest = tf.math.unsorted_segment_max(x, numbers, 3)
    return tf.gather(highest, numbers) + tf.gather(tf.math.unsorted_segment_mean(x, numbers, 3), numbers)


def _in_an_array(x: Any) -> Any:
    steps = tf.TensorArray(x.dtype, 3, element_shape=[None, x.shape[1]])
    steps = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, x * tf.cast(i, x.dtype))), (0, steps))[1]
    return tf.reduce_sum(tf.sin(steps.stack()), 0)


def _branch_in_a_loop(x: Any) -> Any:
    return _loop(x, 2, lambda h: tf.cond(tf.reduce_sum(h) > 0, lambda: 0.5 * h, lambda: h + tf.reduce_mean(h, 0)))


def _state_of_rows(x: Any) -> Any:
    start = tf.zeros([x.shape[1]], x.dtype)
    return tf.scan(lambda a, row: 0.5 * a + row, x, initializer=start)


@tf.custom_gradient
def _with_own_gradient(x: Any) -> Any:
    return tf.tanh(x), lambda upstream: 0.5 * upstream + tf.reduce_mean(upstream, 0)


MIXERS: dict[str, Callable[[Any], Any]] = {
    "softmax over rows": lambda x: x * ops.softmax(x, axis=0),
    "cumulative sum": lambda x: tf.cumsum(x, 0, reverse=True) / tf.cast(_rows(x), x.dtype),
    "cumulative product": lambda x: tf.math.cumprod(1.0 + 0.1 * tf.tanh(x), 0, exclusive=True) * x,
    "next row": lambda x: x + tf.gather(x, (tf.range(_rows(x)) + 1) % _rows(x)),
    "shuffled": lambda x: x * tf.gather(x, tf.argsort(x[:, 0])),
    "first row": lambda x: x - x[0] + 0.5 * tf.gather(x, [0]) * x[-1:],
    "masked": lambda x: x + 0.1 * tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0), 0),
    "counted": lambda x: x * tf.cast(tf.shape(tf.where(x > 0))[0], x.dtype) / 9.0,
    "branch": lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: 2.0 * x, lambda: x - tf.reduce_mean(x, 0)),
    "branch of a row": lambda x: tf.cond(x[0, 0] > 0, lambda: x, lambda: tf.zeros_like(x)),
    "switch": lambda x: tf.switch_case(_rows(x) % 3, [lambda: x, lambda: x * x, lambda: tf.reduce_max(x, 0) - x]),
    "loop": lambda x: _loop(x, 3, lambda h: tf.tanh(h + tf.reduce_mean(h, 0))),
    "loop without rows": lambda x: x + _loop(tf.reduce_sum(x, 0) / 9.0, 2, lambda h: tf.tanh(h + 0.1)),
    "branch in a loop": _branch_in_a_loop,
    "zeros of the batch": lambda x: tf.zeros([_rows(x), x.shape[1]], x.dtype) + tf.ones([_rows(x), 1], x.dtype) * x,
    "numbers of rows": lambda x: x * tf.cast(tf.range(_rows(x)), x.dtype)[:, None] / tf.cast(_rows(x), x.dtype),
    "pairs": lambda x: tf.reduce_mean(tf.tanh(x[:, None] - x[None]), 1) + x,
    "distances": lambda x: x * tf.reduce_sum(tf.exp(-tf.reduce_sum((x[:, None] - x) ** 2, -1)), 0)[:, None],
    "attention of rows": lambda x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x,
    "two views": _two_views,
    "segments": _of_segments,
    "sorted": lambda x: x + tf.sort(x, 0),
    "highest": lambda x: x - tf.math.top_k(tf.transpose(x), 1)[0][:, 0],
    "each row": lambda x: tf.map_fn(lambda row: tf.tanh(row) * tf.reduce_max(row), x),
    "each row at once": lambda x: tf.vectorized_map(lambda row: tf.tanh(row) * tf.reduce_sum(row), x),
    "row after row": _state_of_rows,
    "folded": lambda x: x + tf.foldl(lambda a, row: a + tf.sin(row), x, initializer=tf.zeros([x.shape[1]], x.dtype)) / 9.0,
    "an array": _in_an_array,
    "reversed": lambda x: x + 0.5 * tf.reverse(x, [0]),
    "rolled": lambda x: x - tf.roll(x, 1, 0),
    "padded": lambda x: tf.pad(x, [[1, 0], [0, 0]])[:-1] + x,
    "every second": lambda x: x - tf.reduce_mean(x[::2], 0),
    "scattered": lambda x: tf.tensor_scatter_nd_add(x, tf.range(_rows(x))[:, None], tf.sin(x)),
    "updated": lambda x: tf.tensor_scatter_nd_update(x, [[0]], 2.0 * x[-1:]),
    "in one axis": lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1])) * 9.0, tf.shape(x)) + x,
    "pieces": lambda x: tf.concat(tf.split(x, [1, _rows(x) - 1])[::-1], 0),
    "stacked": lambda x: tf.reduce_mean(tf.stack([x, tf.nn.relu(x)], 0), 0),
    "median": lambda x: x - ops.median(x, axis=0),
    "quantile of rows": lambda x: x * ops.quantile(x, 0.3, axis=1, keepdims=True),
    "standardized": lambda x: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.5),
    "normed": lambda x: x / (1.0 + tf.norm(x)),
    "maxima": lambda x: x / (1.0 + tf.reduce_max(tf.abs(x), 0, keepdims=True)) + tf.reduce_min(x),
    "argmax": lambda x: x + tf.gather(x, tf.argmax(x[:, 0]))[None] * tf.cast(tf.argmin(x, 0), x.dtype),
    "drawn": lambda x: x + 0.1 * tf.random.stateless_normal(tf.shape(x), [3, 1], dtype=x.dtype),
    "shuffled by numbers": lambda x: x + tf.gather(x, tf.random.experimental.stateless_shuffle(tf.range(_rows(x)), [1, 2])),
    "own gradient": _with_own_gradient,
    "no gradient": lambda x: x + tf.stop_gradient(tf.reduce_max(x, 0)),
    "products": lambda x: tf.einsum("na,nb->ab", x, x)[:1] / 9.0 + x,
    "inverse": lambda x: x @ tf.linalg.inv(tf.matmul(x, x, transpose_a=True) + 9.0 * tf.eye(x.shape[1], dtype=x.dtype)),
    "counts": lambda x: x * tf.cast(tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), minlength=2), x.dtype)[0] / 5.0,
    "unique": lambda x: x / tf.cast(tf.size(tf.unique(tf.cast(x[:, 0] * 2, tf.int32))[0]), x.dtype),
    "ragged": lambda x: tf.RaggedTensor.from_row_lengths(
        tf.reshape(x, [-1]), tf.fill([_rows(x)], x.shape[1])
    ).to_tensor(shape=[None, x.shape[1]]),
    "sizes": lambda x: x * tf.cast(tf.size(x), x.dtype) / tf.cast(tf.reduce_prod(tf.shape(x)) + 1, x.dtype),
}  # fmt: skip
"""Functions of rows `[n, features]`. Most of them compare the rows of a batch."""


@keras.saving.register_keras_serializable("tests")
class Mixer(L.Layer):
    """Calls one of the functions on rows."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def call(self, x: Any) -> Any:
        result = MIXERS[self.kind](x)
        result.set_shape([None, x.shape[1]])
        return result

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class Keeper(L.Layer):
    """Adds losses, and keeps statistics of rows."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any, training: bool = False) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)) + 0.01 * ops.sum(ops.abs(x)))
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.count.assign_add(ops.cast(ops.shape(x)[0], self.count.dtype))
        return self.scale * (x - ops.stop_gradient(ops.convert_to_tensor(self.mean)))


_OF_NUMBERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: L.Dense(4, "tanh"),
    "batch normalization": lambda: L.BatchNormalization(momentum=0.5),
    "layer normalization": L.LayerNormalization,
    "dropout": lambda: L.Dropout(0.3, seed=3),
    "noise": lambda: L.GaussianNoise(0.1, seed=4),
    "unit": L.UnitNormalization,
    "keeper": Keeper,
    "prelu": L.PReLU,
    "softmax": L.Softmax,
    "penalty": lambda: L.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"),
}

_OF_SEQUENCES: dict[str, Callable[[], Any]] = {
    "convolution": lambda: L.Conv1D(4, 2, padding="same", activation="relu"),
    "causal": lambda: L.Conv1D(4, 2, padding="causal", dilation_rate=2),
    "separable": lambda: L.SeparableConv1D(4, 2, padding="same"),
    "recurrent": lambda: L.LSTM(4, return_sequences=True, dropout=0.2, seed=5),
    "gated": lambda: L.GRU(4, return_sequences=True),
    "both ways": lambda: L.Bidirectional(L.SimpleRNN(2, return_sequences=True)),
    "batch normalization": lambda: L.BatchNormalization(momentum=0.5),
    "group normalization": lambda: L.GroupNormalization(2),
    "spatial dropout": lambda: L.SpatialDropout1D(0.3, seed=6),
    "pool": lambda: L.MaxPooling1D(2, padding="same"),
    "each step": lambda: L.TimeDistributed(L.Dense(4, "tanh")),
}

_OF_PICTURES: dict[str, Callable[[], Any]] = {
    "convolution": lambda: L.Conv2D(4, 3, padding="same", activation="relu"),
    "strided": lambda: L.Conv2D(4, 2, 2),
    "depthwise": lambda: L.DepthwiseConv2D(2, padding="same"),
    "transposed": lambda: L.Conv2DTranspose(4, 2, padding="same"),
    "batch normalization": lambda: L.BatchNormalization(momentum=0.5),
    "average": lambda: L.AveragePooling2D(2, padding="same"),
    "pool": lambda: L.MaxPooling2D(2, padding="same"),
    "larger": lambda: L.UpSampling2D(2),
    "rescaled": lambda: L.Rescaling(0.5),
}


def _contrast(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.matmul(p, p, transpose_b=True) - tf.matmul(y, y, transpose_b=True)))


def _worst_rows(y: Any, p: Any) -> Any:
    of_rows = tf.reduce_sum(tf.square(y - p), -1)
    return tf.reduce_mean(tf.math.top_k(of_rows, tf.minimum(2, tf.size(of_rows)))[0])


_LOSSES: dict[str, Callable[[], Any]] = {
    "mse": lambda: "mse", "mae": lambda: "mae", "huber": keras.losses.Huber, "log": keras.losses.LogCosh,
    "cosine": keras.losses.CosineSimilarity, "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "weighed": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "crossentropy": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    "contrast": lambda: _contrast, "worst rows": lambda: _worst_rows,
}  # fmt: skip

_METRICS: dict[str, Callable[[], Any]] = {
    "mae": lambda: "mae", "cosine": keras.metrics.CosineSimilarity, "root": keras.metrics.RootMeanSquaredError,
    "r2": keras.metrics.R2Score, "accuracy": lambda: "categorical_accuracy", "worst rows": lambda: _worst_rows,
}  # fmt: skip

_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: O.SGD(0.05, **options),
    "momentum": lambda **options: O.SGD(0.02, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: O.Adam(0.02, epsilon=1e-2, **options),
    "adamw": lambda **options: O.AdamW(0.02, epsilon=1e-2, weight_decay=0.05, **options),
    "rmsprop": lambda **options: O.RMSprop(0.01, epsilon=1e-2, **options),
    "lamb": lambda **options: O.Lamb(0.01, epsilon=1e-2, **options),
}
_OPTIONS: list[dict[str, Any]] = [
    {}, {}, {"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.05}, {"use_ema": True, "ema_overwrite_frequency": 1},
    {"gradient_accumulation_steps": 2},
]  # fmt: skip


class Program(NamedTuple):
    """A program that was drawn.

    Attributes:
        seed: It was drawn from this.
        text: What it is.
        make: Makes the model and compiles it.
        x, y, weights: The data.
        batch_size: The last batch has fewer rows.
    """

    seed: int
    text: str
    make: Callable[[], Any]
    x: dict[str, np.ndarray]
    y: np.ndarray
    weights: np.ndarray | None
    batch_size: int


def drawn(seed: int) -> Program:
    """Draws a program."""
    draw = random.Random(seed)
    inputs = draw.sample(["numbers", "words", "pictures"], draw.choice([1, 1, 2]))
    parts = {name: _drawn_part(draw, name) for name in inputs}
    joins = draw.choice(["add", "concatenate", "attention"])
    behind = [_drawn_layer(draw) for _ in range(draw.randint(1, 4))]
    loss, metrics = draw.choice(sorted(_LOSSES)), draw.sample(sorted(_METRICS), 2)
    optimizer, options = draw.choice(sorted(_OPTIMIZERS)), draw.choice(_OPTIONS)
    batch_size, rest = draw.randint(3, 7), draw.randint(1, 3)
    rng = np.random.RandomState(seed)
    rows = batch_size + min(rest, batch_size - 1)
    made = {"numbers": rng.randn(rows, 6), "words": rng.randint(0, 9, (rows, 5)), "pictures": rng.rand(rows, 6, 6, 2)}
    weights = rng.rand(rows) + 0.1 if draw.choice([True, False, False]) else None

    def make() -> Any:
        keras.utils.set_random_seed(seed)
        given = {"numbers": keras.Input((6,), name="numbers"), "words": keras.Input((5,), dtype="int32", name="words"),
                 "pictures": keras.Input((6, 6, 2), name="pictures")}  # fmt: skip
        joined = [_called(name, kinds, given[name]) for name, kinds in parts.items()]
        if len(joined) == 1:
            (x,) = joined
        elif joins == "attention":
            x = L.Flatten()(L.MultiHeadAttention(2, 2, dropout=0.1, seed=8)(*(L.Reshape((2, 2))(each) for each in joined)))
        else:
            x = L.Dense(4)((L.Add if joins == "add" else L.Concatenate)()(joined))
        for kind, name in behind:
            x = Mixer(name)(x) if kind == "mixer" else L.Dense(4, "tanh")(_OF_NUMBERS[name]()(x))
        model = keras.Model({name: given[name] for name in inputs}, L.Dense(3)(x))
        model.compile(
            _OPTIMIZERS[optimizer](**options), _LOSSES[loss](), metrics=[_METRICS[each]() for each in metrics],
            weighted_metrics=["mse"], steps_per_execution=1 + seed % 2,
        )  # fmt: skip
        return model

    text = f"{parts}, {joins}, {behind}, {loss}, {metrics}, {optimizer} {options}, {rows} rows in batches of {batch_size}"
    y = np.eye(3)[rng.randint(0, 3, rows)]
    return Program(seed, text, make, {name: made[name] for name in inputs}, y, weights, batch_size)


def _drawn_layer(draw: random.Random) -> tuple[str, str]:
    kind = draw.choice(["mixer", "mixer", "layer"])
    return kind, draw.choice(sorted(MIXERS if kind == "mixer" else _OF_NUMBERS))


def _drawn_part(draw: random.Random, name: str) -> list[str]:
    kinds = {"numbers": _OF_NUMBERS, "words": _OF_SEQUENCES, "pictures": _OF_PICTURES}[name]
    return [draw.choice(sorted(kinds)) for _ in range(draw.randint(1, 3))]


def _called(name: str, kinds: list[str], x: Any) -> Any:
    """Returns rows of four features that are computed of an input."""
    if name == "words":
        x = L.Embedding(9, 4)(x)
    makers = {"numbers": _OF_NUMBERS, "words": _OF_SEQUENCES, "pictures": _OF_PICTURES}[name]
    for kind in kinds:
        x = makers[kind]()(x)
    if name == "words":
        x = L.GlobalMaxPooling1D()(x)
    elif name == "pictures":
        x = L.Flatten()(x) if len(kinds) % 2 else L.GlobalAveragePooling2D()(x)
    return L.Dense(4)(x)
