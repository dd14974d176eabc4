"""Losses, and weights of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep
from scenarios.base import SCENARIOS, dense, init, regression, scenario, trained

_O = keras.optimizers


class TwoScaledOptimizers(keras.Model):
    """Scales both losses before it applies either gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(), dense()
        self.optimizers = [_O.LossScaleOptimizer(_O.SGD(rate), initial_scale=64.0) for rate in (0.05, 0.1)]
        for optimizer, net in zip(self.optimizers, (self.first, self.second), strict=True):
            optimizer.build(net.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.first(x) + self.second(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        nets, tapes = (self.first, self.second), (tf.GradientTape(), tf.GradientTape())
        scaled = []
        for optimizer, net, tape in zip(self.optimizers, nets, tapes, strict=True):
            with tape:
                scaled.append(optimizer.scale_loss(tf.reduce_mean(tf.square(net(x) - y))))
        for optimizer, net, tape, loss in zip(self.optimizers, nets, tapes, scaled, strict=True):
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return {"loss": scaled[0] / 64.0}


@scenario
def two_scaled_optimizers() -> dict[str, Any]:
    x, y = regression()
    model = TwoScaledOptimizers()
    model.compile()
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


def _loss(name: str, loss: Callable[[], Any], **compile_args: Any) -> None:
    def fn() -> dict[str, Any]:
        model = dense()
        model.compile(_O.SGD(0.002), loss(), **compile_args)
        x, y = regression()
        weights = np.linspace(0.1, 3.0, len(x)).astype("float32")
        return trained(model, x, y, sample_weight=weights)

    SCENARIOS[name] = fn


_L = keras.losses
_loss("loss_sum", lambda: _L.MeanSquaredError(reduction="sum"))
_loss("loss_mean", lambda: _L.MeanSquaredError(reduction="mean"), weighted_metrics=["mae"])
_loss("loss_none", lambda: _L.MeanSquaredError(reduction=None))
_loss("loss_none_eagerly", lambda: _L.MeanSquaredError(reduction=None), run_eagerly=True)
_loss("loss_mean_with_sample_weight", lambda: _L.MeanSquaredError(reduction="mean_with_sample_weight"))


@scenario
def loss_none_of_batches_of_one_size() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.002), _L.MeanSquaredError(reduction="none"))
    return trained(model, tf.data.Dataset.from_tensor_slices(regression()).batch(12, drop_remainder=True), batch_size=None)


@scenario
def loss_none_of_a_part_without_rows() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.002), _L.MeanSquaredError(reduction=None))
    return trained(model, *regression(33))


@scenario
def loss_over_the_batch() -> dict[str, Any]:
    model = dense(out=3)
    similarity = keras.metrics.CosineSimilarity(axis=-2)
    model.compile(_O.SGD(0.05), _L.CosineSimilarity(axis=0), metrics=[similarity])
    x, y = regression()
    return trained(model, x, np.concatenate([y, -y, y**2], 1))


@scenario
def nothing_beside_an_output() -> dict[str, Any]:
    x, y = regression()
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, "tanh", kernel_initializer=init(1))(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name=name, kernel_initializer=init(2))(hidden) for name in "ab"])
    model.compile(_O.SGD(0.05), "mse")
    weights = [None, np.abs(y[:, 0])]
    history = model.fit(x, [y, -y], sample_weight=weights, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    model.compile(_O.SGD(0.05), [None, "mse"])
    model.fit(x, [None, y], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"losses": history["loss"], "weights": model.get_weights(), "result": model.evaluate(x, [None, y], 16, verbose=0)}


def _segmentation() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    x = rng.randn(37, 6, 6, 1).astype("float32")
    return x, (x + 0.3 * rng.randn(37, 6, 6, 1) > 0).astype("float32")


def _mixed_rows(name: str, loss: Callable[[], Any], **fit_options: Any) -> None:
    def body() -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3, padding="same", activation="tanh", kernel_initializer=init(1)),
                layers.Conv2D(1, 1, activation="sigmoid", kernel_initializer=init(2)),
            ]
        )
        model.compile(_O.SGD(0.2, momentum=0.9), loss())
        return trained(model, *_segmentation(), **fit_options)

    body.__name__ = name
    scenario(body)


_mixed_rows("loss_dice", lambda: _L.Dice())
_mixed_rows("loss_dice_by_name", lambda: "dice", sample_weight=np.linspace(0.1, 2.0, 37).astype("float32"))
_mixed_rows("loss_dice_by_row", lambda: _L.Dice(axis=(1, 2, 3)))
_mixed_rows("loss_tversky_sum", lambda: _L.Tversky(alpha=0.3, beta=0.7, reduction="sum"))


@scenario
def loss_circle() -> dict[str, Any]:
    """Each row is compared with every other one of the batch; the last batch has five."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, kernel_initializer=init(1)),
            layers.UnitNormalization(),
        ]
    )
    model.compile(_O.SGD(0.01), _L.Circle(gamma=2.0, margin=0.25))
    x, _ = regression()
    return trained(model, x, np.arange(37) % 3)


@scenario
def loss_circle_in_a_custom_loop() -> dict[str, Any]:
    strategy = tf.distribute.get_strategy()
    x, _ = regression(32)
    results = {}
    for reduction in ("sum_over_batch_size", "sum", "none"):
        model, optimizer = dense(out=3), _O.SGD(0.01)
        loss_of = _L.Circle(gamma=2.0, reduction=reduction)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer, loss_of: Any = loss_of) -> Any:
            bx, labels = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(labels, tf.math.l2_normalize(model(bx, training=True), 1)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def train(batch: Any, step: Any = step) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, np.arange(32) % 3)).batch(13))
        results[f"losses_{reduction}"] = [float(train(batch)) for _ in range(2) for batch in dataset]
        results[f"weights_{reduction}"] = model.get_weights()
    return results


def _root_mean_square(y: Any, p: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - p)))


def _sum_of_squares(y: Any, p: Any) -> Any:
    return keras.ops.sum(keras.ops.square(y - p)) / 16.0


def _overlap(y: Any, p: Any) -> Any:
    shared = keras.ops.sum(y * keras.ops.sigmoid(p))
    return 1.0 - (2.0 * shared + 1.0) / (keras.ops.sum(y) + keras.ops.sum(keras.ops.sigmoid(p)) + 1.0)


def _contrast(y: Any, p: Any) -> Any:
    """The loss of each row: to tell it from all others of the batch."""
    rows = keras.ops.arange(keras.ops.shape(p)[0])
    return _L.sparse_categorical_crossentropy(rows, keras.ops.matmul(p, keras.ops.transpose(p)), from_logits=True)


@scenario
def losses_that_users_write() -> dict[str, Any]:
    """Functions that reduce rows in their own ways, with a last batch of one row: one replica has none of it."""
    x, y = regression(33)
    results = {}
    for loss in (_root_mean_square, _sum_of_squares, _overlap, _contrast):
        model = dense()
        model.compile(_O.SGD(0.05), loss, metrics=[loss])
        results[loss.__name__] = trained(model, x, (y > 0).astype("float32"))
    return results


def _ranking(y_true: Any, y_pred: Any) -> Any:
    """The share of pairs of two classes in order; like that of scikit-learn, it refuses other targets, and a single class."""

    def of_arrays(targets: np.ndarray, found: np.ndarray) -> np.float32:
        if set(np.unique(targets)) != {0.0, 1.0}:
            raise ValueError("The targets are not of two classes.")
        return np.mean(found[targets == 1][:, None] > found[targets == 0], dtype=np.float32)

    return tf.ensure_shape(tf.numpy_function(of_arrays, [y_true, y_pred], tf.float32), [])


class _BestRanking(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="best")
        self.best = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.best.assign(tf.maximum(self.best, _ranking(y_true, y_pred)))

    def result(self) -> Any:
        return self.best.value


@scenario
def metrics_that_refuse_most_rows() -> dict[str, Any]:
    """A part of a batch may have one class only, where the whole one has two."""
    x, y = regression(33)
    y = (y > 0).astype("float32")
    y[[0, 15, 16, 31]] = [[1], [0], [0], [1]]
    model = dense(activation="sigmoid")
    model.compile(_O.SGD(0.05), "binary_crossentropy", metrics=[_ranking, _BestRanking()])
    return trained(model, x[:32], y[:32])


def _gathered_contrast(y_true: Any, y_pred: Any) -> Any:
    rows, labels = tfrep.all_gather(y_pred), tfrep.all_gather(y_true)
    distances = keras.ops.sum(keras.ops.square(rows[:, None] - rows[None]), axis=-1)
    return keras.ops.mean(keras.ops.where(labels == keras.ops.transpose(labels), distances, keras.ops.exp(-distances)))


def _reduced_root(y_true: Any, y_pred: Any) -> Any:
    total, count = keras.ops.sum(keras.ops.square(y_true - y_pred)), keras.ops.cast(keras.ops.size(y_true), "float32")
    total, count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, [total, count])
    return keras.ops.sqrt(total / count)


class _Extremes(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.largest = self.add_weight(shape=(), initializer="zeros")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, tfrep.all_reduce(keras.ops.max(y_pred, initial=-9.0), "max")))
        self.total.assign_add(tfrep.all_sum(keras.ops.sum(y_true)))

    def result(self) -> Any:
        return {"largest": self.largest.value, "total": self.total.value}


@scenario
def losses_with_collectives() -> dict[str, Any]:
    """Functions and a metric that see all rows by themselves."""
    x, y = regression(33)
    results = {}
    for loss in (_gathered_contrast, _reduced_root):
        model = dense()
        model.compile(_O.SGD(0.05), loss, metrics=[loss, _Extremes()])
        results[loss.__name__] = trained(model, x, (y > 0).astype("float32"))
    return results


class _DividedByItsMean(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.running = tf.Variable(1.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        value = tf.reduce_mean(tf.square(y_true - y_pred))
        self.running.assign(0.9 * self.running + 0.1 * value)
        return value / self.running


class _Collected(keras.metrics.Metric):
    """Keeps all targets of an epoch."""

    def __init__(self) -> None:
        super().__init__(name="collected")
        self.targets = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.targets.assign(tf.concat([self.targets, tf.reshape(y_true, [-1])], 0))

    def result(self) -> Any:
        return {"number": tf.cast(tf.size(self.targets), tf.float32), "sum": tf.reduce_sum(self.targets)}

    def reset_state(self) -> None:
        self.targets.assign(tf.zeros([0]))


@scenario
def state_in_losses_and_metrics() -> dict[str, Any]:
    """Variables of TensorFlow, which only the rows of the data may change."""
    loss, metric = _DividedByItsMean(), _Collected()
    model = dense()
    model.compile(_O.SGD(0.05), loss, metrics=[metric])
    x, y = regression()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights(), "running": loss.running.numpy()}


@scenario
def class_weight() -> dict[str, Any]:
    model = dense(out=3, activation="softmax")
    model.compile(_O.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, _ = regression()
    return trained(model, x, (np.arange(37) % 16 // 6).astype("int32"), class_weight={0: 1.0, 1: 4.0, 2: 0.5})


@scenario
def multi_output() -> dict[str, Any]:
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    h = layers.Concatenate()([a, b])
    u = layers.Dense(1, kernel_initializer=init(1), name="u")(h)
    v = layers.Dense(2, kernel_initializer=init(2), name="v")(h)
    model = keras.Model({"a": a, "b": b}, {"u": u, "v": v})
    model.compile(_O.SGD(0.05), {"u": "mse", "v": "mae"}, loss_weights={"u": 1.0, "v": 0.5}, metrics={"u": ["mae"]})
    x, y = regression()
    return trained(model, {"a": x, "b": x[:, :2] + 1}, {"u": y, "v": x[:, 2:]})


@scenario
def regularizer_and_add_loss() -> dict[str, Any]:
    class Activity(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, kernel_regularizer="l2", kernel_initializer=init(1)),
            Activity(),
            layers.Dense(1, kernel_initializer=init(2)),
        ]
    )
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression())


@scenario
def masked_sequence() -> dict[str, Any]:
    """A mask that is longer on some replicas than on others, through a recurrent layer into the loss."""
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (21, 6))
    for row, length in enumerate(rng.randint(1, 7, 21)):
        x[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=init(1)),
            layers.LSTM(4, return_sequences=True, kernel_initializer=init(2), recurrent_initializer=init(3)),
            layers.Dense(1, kernel_initializer=init(4)),
        ]
    )
    model.compile(_O.SGD(0.1), "mse")
    return trained(model, x, rng.randn(21, 6, 1).astype("float32"), batch_size=8)


class _PenalizesRows(layers.Layer):
    """Adds a loss for each row, as layers that were written for Keras 2 do, and one for each column."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=-1))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x), axis=0))
        return x


@scenario
def added_losses_of_rows() -> dict[str, Any]:
    """Keras adds them up."""

    def of(**settings: Any) -> dict[str, Any]:
        hidden = layers.Dense(6, "tanh", kernel_initializer=init(1))
        model = keras.Sequential([keras.Input((4,)), hidden, _PenalizesRows(), layers.Dense(1, kernel_initializer=init(2))])
        model.compile(_O.SGD(0.05), "mse", **settings)
        return trained(model, *regression(), epochs=2)

    return {"compiled": of(), "eager": of(run_eagerly=True)}
