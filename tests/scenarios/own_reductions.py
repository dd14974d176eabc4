"""Losses, metrics and state that users reduce over rows in their own ways, with a last batch of which one replica has no row."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfrep_strategy as tfrep
from scenarios.base import dense, init, regression, scenario, trained

_O = keras.optimizers


class SumOfActivities(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.002 * ops.sum(ops.square(x)))
        return x


@scenario
def sums_over_rows_in_a_layer() -> dict[str, Any]:
    hidden = layers.Dense(8, "tanh", kernel_initializer=init(1), kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), hidden, SumOfActivities(), layers.Dense(1, kernel_initializer=init(2))])
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression(33))


class Sums(keras.Model):
    """Adds up the errors of the rows, and a mean."""

    scales = False

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.errors, self.rows = keras.metrics.Mean(name="errors"), keras.metrics.Mean(name="rows")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch[:2]
        with tf.GradientTape() as tape:
            prediction = self(x)
            error = tf.reduce_sum(tf.square(prediction - y))
            loss = error / 16.0 + 0.1 * ops.mean(ops.abs(prediction))
            loss = self.optimizer.scale_loss(loss) if self.scales else loss
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        self.errors.update_state(error)
        self.rows.update_state(ops.shape(x)[0])
        return {"loss": loss, "errors": self.errors.result(), "rows": self.rows.result()}


class Squares(Sums):
    """Lets the tape add up the rows of what has no reduction, and counts rows in a log."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch[:2]
        with tf.GradientTape() as tape:
            squares = ops.square(self.net(x) - y)
        gradients = tape.gradient(squares, self.net.trainable_variables)
        self.optimizer.apply([gradient / 16.0 for gradient in gradients], self.net.trainable_variables)
        return {"rows": tf.shape(x)[0]}


class ScaledSums(Sums):
    scales = True


@scenario
def sums_over_rows_in_a_step() -> dict[str, Any]:
    x, y = regression(33)
    results = {}
    for kind in (Sums, ScaledSums, Squares):
        model = kind()
        model.compile(_O.SGD(0.05, clipnorm=0.5))
        history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
        results[kind.__name__] = {**history, "weights": model.get_weights()}
    return results


class SumsOverKnownRows(Sums):
    """Needs the number of rows while it is traced."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x) - y) + tf.zeros([x.shape[0], 1])) / x.shape[0]
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


@scenario
def sums_over_rows_of_batches_of_one_size() -> dict[str, Any]:
    x, y = regression(33)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    hidden = layers.Dense(8, "tanh", kernel_initializer=init(1))
    active = keras.Sequential([keras.Input((4,)), hidden, SumOfActivities(), layers.Dense(1, kernel_initializer=init(2))])
    results = {}
    for model in (Sums(), ScaledSums(), Squares(), SumsOverKnownRows(), active):
        model.compile(_O.SGD(0.05, clipnorm=0.5), "mse" if model is active else None)
        batches: list[Any] = []
        look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=batches: seen.append(dict(logs)))
        history = model.fit(data, epochs=2, verbose=0, callbacks=[look]).history
        one = model.train_on_batch(x[:16], y[:16], return_dict=True)
        results[type(model).__name__] = {**history, "one": one, "batches": batches, "weights": model.get_weights()}
    return results


def _of_unmasked(y: Any, p: Any) -> Any:
    """The loss of TensorFlow's tutorial on transformers: 0 is padding."""
    losses = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    counts = ops.cast(y != 0, losses.dtype)
    return ops.sum(losses * counts) / ops.sum(counts)


def _accuracy_of_unmasked(y: Any, p: Any) -> Any:
    counts = ops.cast(y != 0, "float32")
    match = ops.cast(ops.equal(ops.cast(y, "int64"), ops.cast(ops.argmax(p, axis=-1), "int64")), "float32")
    return ops.sum(match * counts) / ops.sum(counts)


class _SameLabels(keras.losses.Loss):
    """Supervised contrast as on keras.io: a loss with a `__call__` of its own."""

    def __call__(self, labels: Any, features: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        features = features / ops.sqrt(ops.sum(ops.square(features), axis=1, keepdims=True) + 1e-6)
        labels = ops.reshape(labels, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32")
        same = same / ops.sum(same, axis=1, keepdims=True)
        return ops.mean(ops.sum(-same * ops.log_softmax(features @ ops.transpose(features)), axis=1))


@scenario
def losses_of_some_rows() -> dict[str, Any]:
    """Where rows or pairs of rows do not all count."""
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (33, 6))
    y = x * (np.arange(6) < rng.randint(1, 7, (33, 1)))
    tagger = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Embedding(9, 5, embeddings_initializer=init(1)),
            layers.Dense(9, kernel_initializer=init(2)),
        ]
    )
    tagger.compile(_O.Adam(0.02), _of_unmasked, metrics=[_accuracy_of_unmasked])
    encoder = dense(out=3)
    encoder.compile(_O.SGD(0.05), _SameLabels())
    return {
        "masked": trained(tagger, x, y),
        "contrast": trained(encoder, regression(33)[0], (np.arange(33) % 3).astype("float32")),
    }


class _Largest(keras.metrics.Metric):
    """Keeps nothing but another metric."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.mean = keras.metrics.Mean(name="mean")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(ops.max(ops.abs(y - p)))

    def result(self) -> Any:
        return self.mean.result()


class _MeanOfBatches(keras.metrics.Metric):
    """Gets a number per batch."""

    def __init__(self) -> None:
        super().__init__(name="of_batches")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, value: Any) -> None:
        self.total.assign_add(value)
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.batches


class Measured(keras.Model):
    """Overrides `compute_metrics` as Keras's documentation does, where a result is read before its update."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.largest, self.of_batches = _Largest(), _MeanOfBatches()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(y, y_pred)
        self.of_batches.update_state(ops.mean(ops.square(y - y_pred)))
        return results | {"now": self.largest.result(), "mean_square": self.of_batches.result()}


@scenario
def metrics_of_metrics_and_of_scalars() -> dict[str, Any]:
    model = Measured()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae", _Largest()])
    return trained(model, *regression(33))


class RootOfActivities(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.sqrt(ops.mean(ops.square(x)) + 1e-3))
        return x


class Quotients(keras.Model):
    """Losses that are no means: of some rows, roots, bounds and maxima of means."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.doubt = self.add_weight(shape=(), initializer="ones", name="doubt")
        self.net = keras.Sequential([dense(), RootOfActivities()])
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        weights, errors = ops.exp(x[:, :1]), ops.square(y - y_pred)
        of_some = ops.sum(weights * errors) / ops.sum(weights)
        bounded = ops.maximum(ops.mean(ops.square(y_pred)), 0.2) + 0.1 * ops.max(errors) + 0.1 * ops.var(y_pred)
        return of_some + ops.exp(-self.doubt) * ops.sqrt(ops.mean(errors) + 1e-3) + self.doubt + bounded + sum(self.losses)

    def train_step(self, batch: Any) -> Any:
        if not self.by_hand:
            return super().train_step(batch)
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.seen.update_state(loss)
        told = {"perplexity": ops.exp(loss), "norm": tf.linalg.global_norm(gradients), "spread": ops.var(y)}
        return {"loss": loss, "seen": self.seen.result(), **told}


@scenario
def losses_that_are_no_means() -> dict[str, Any]:
    x, y = regression(33)
    results = {}
    for by_hand in (True, False):
        model = Quotients(by_hand)
        model(x[:1])
        model.compile(_O.SGD(0.05, momentum=0.9))
        results[f"by hand: {by_hand}"] = trained(model, x, y)
    return results


class SumsOfLosses(keras.metrics.Metric):
    """Adds up a loss of Keras, and counts rows, as a perplexity does."""

    def __init__(self) -> None:
        super().__init__(name="mean_of_sums")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")
        self.loss = keras.losses.MeanSquaredError(reduction="sum")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(self.loss(y, p))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        return self.total / ops.maximum(self.count, 1.0)


class SumOverRows(keras.Model):
    """Divides a sum of Keras's by the number of rows, in a step, a layer and a loss, and adds scalars up."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.summed = keras.losses.MeanSquaredError(reduction="sum")
        self.steps, self.losses_told = keras.metrics.Sum(name="steps"), keras.metrics.Sum(name="losses_told")

    def call(self, x: Any) -> Any:
        outputs = self.net(x)
        self.add_loss(0.1 * self.summed(ops.zeros_like(outputs), outputs) / ops.cast(ops.shape(x)[0], "float32"))
        return outputs

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.summed(y, self(x)) / tf.cast(tf.shape(x)[0], tf.float32) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.steps.update_state(1.0)
        self.losses_told.update_state(loss)
        return {"loss": loss, "steps": self.steps.result(), "losses_told": self.losses_told.result()}


@scenario
def sum_losses_divided_by_rows() -> dict[str, Any]:
    x, y = regression()
    summed, results = keras.losses.MeanSquaredError(reduction="sum"), {}
    for name, model, loss in (
        ("step", SumOverRows(), "mse"),
        ("compiled", dense(), lambda y, p: summed(y, p) / ops.cast(ops.shape(y)[0], "float32")),
        ("metric", dense(), "mse"),
    ):
        model(x[:1])
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=None if name == "step" else [SumsOfLosses()])
        results[name] = trained(model, x, y)
    return results


class ReducesItself(keras.Model):
    """Its step normalizes rows, and divides sums over them, by what it reduces itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = dense(out=3), layers.Dense(1, kernel_initializer=init(3))
        self.seen = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        return self.out(self.net(x))

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        rows = tfrep.all_reduce(tf.cast(tf.shape(x)[0], tf.float32))
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                hidden = self.net(x)
                center = tfrep.all_reduce(tf.reduce_sum(hidden, 0)) / rows
                spread = tfrep.all_reduce(tf.reduce_sum(tf.square(hidden - center), 0)) / rows
                guess = self.out((hidden - center) / tf.sqrt(spread + 0.1))
                squares = tf.square(guess[:, 0])
            slopes = inner.gradient(squares, x)
            errors = tf.reduce_sum(tf.square(guess - y)) + 0.1 * tf.reduce_sum(tf.square(slopes))
            loss = errors / rows
        variables = self.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
        self.optimizer.apply(gradients, variables)
        self.seen.assign_add(center)
        return {"loss": loss, "norm": norm, "slopes": slopes, "errors": errors}


@scenario
def sums_that_a_step_reduces_itself() -> dict[str, Any]:
    x, y = regression(36)
    model = ReducesItself()
    model(x[:1])
    model.compile(_O.SGD(0.05))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}
