"""Metrics and callbacks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scenarios.base import dense, regression, scenario, trained

_O = keras.optimizers


@scenario
def metrics_of_all_kinds() -> dict[str, Any]:
    M = keras.metrics
    model = dense(activation="sigmoid")
    model.compile(
        _O.SGD(0.1),
        "binary_crossentropy",
        metrics=[
            "binary_accuracy", M.AUC(name="auc"), M.Precision(name="precision"), M.Recall(name="recall"),
            M.BinaryIoU(name="iou"), M.F1Score(threshold=0.5, name="f1"), M.R2Score(name="r2"),
            M.TruePositives(name="tp"), M.MeanSquaredError(name="mse"), M.RootMeanSquaredError(name="rmse"),
        ],
    )  # fmt: skip
    x, y = regression(60)
    return trained(model, x, (y > 0).astype("float32"), batch_size=20)


@scenario
def categorical_metrics() -> dict[str, Any]:
    M = keras.metrics
    model = dense(out=5, activation="softmax")
    metrics = [M.SparseTopKCategoricalAccuracy(2, name="top2"), "accuracy", M.SparseCategoricalCrossentropy(name="ce")]
    model.compile(_O.SGD(0.1), "sparse_categorical_crossentropy", metrics=metrics)
    x, _ = regression(60)
    return trained(model, x, np.arange(60) % 5, batch_size=20)


class Reported(keras.metrics.Metric):
    """State that is no sum over rows: a maximum, the mean of what batches have as their median, and a count of batches."""

    def __init__(self, name: str = "reported") -> None:
        super().__init__(name=name)
        self.worst, self.spread, self.batches = (self.add_variable((), "zeros", name=n) for n in ("worst", "spread", "batches"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(y_true - y_pred)
        self.worst.assign(keras.ops.maximum(self.worst, keras.ops.max(error)))
        self.spread.assign_add(keras.ops.std(error))
        self.batches.assign_add(1.0)

    def result(self) -> dict[str, Any]:
        return {"worst": self.worst.value, "spread": self.spread / self.batches, "batches": self.batches.value}


def _root_mean_square(y: Any, p: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - p)))


def _largest(y: Any, p: Any) -> Any:
    return keras.ops.max(keras.ops.abs(y - p))


@scenario
def metrics_that_are_no_sums() -> dict[str, Any]:
    """Metrics that users write, with a last batch of one row: one replica has none of it."""
    model = dense()
    metrics = [Reported(), _root_mean_square, _largest, "mae"]
    model.compile(_O.SGD(0.05), "mse", metrics=metrics, weighted_metrics=[Reported("weighted")])
    x, y = regression(33)
    return trained(model, x, y, sample_weight=np.linspace(0.5, 2.0, 33).astype("float32"))


@scenario
def callbacks_that_decide() -> dict[str, Any]:
    C = keras.callbacks
    model = dense()
    model.compile(_O.SGD(0.3), "mse")
    x, y = regression()
    seen: list[float] = []
    history = model.fit(
        x, y, batch_size=16, epochs=12, shuffle=False, verbose=0, validation_data=(x, y),
        callbacks=[
            C.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True),
            C.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
            C.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])),
        ],
    )  # fmt: skip
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "batch_losses": seen,
        "rate": float(model.optimizer.learning_rate),
        "iterations": int(model.optimizer.iterations),
    }


@scenario
def terminate_on_nan() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.1), "mse")
    x, y = regression(64)
    y[30] = np.nan
    batches: list[int] = []
    stop = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch)),
    ]
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=stop)
    return {"batches": batches}


class F1OfLabels(keras.metrics.F1Score):
    """It makes its variables in its first update."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.one_hot(keras.ops.cast(y_true[:, 0], "int32"), 3), y_pred, sample_weight)


class LargestError(keras.metrics.Metric):
    """It is no sum, holds another metric, and makes its own variable in its first update. Keras does not know its class."""

    def __init__(self, scale: float, name: str) -> None:
        super().__init__(name=name)
        self.scale, self.largest, self.parts = scale, None, [keras.metrics.Mean()]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if self.largest is None:
            self.largest = self.add_variable((), "zeros", name="largest")
        error = keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred) * self.scale
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(error)))
        self.parts[0].update_state(error)

    def result(self) -> Any:
        return self.largest + self.parts[0].result()


class TotalLoss(keras.metrics.Metric):
    """It is updated with a scalar, and makes its variable then."""

    def update_state(self, loss: Any) -> None:
        if not self.variables:
            self.total = self.add_variable((), "zeros", name="total")
        self.total.assign_add(loss)

    def result(self) -> Any:
        return self.total * 1.0


class MakesMetricsLate(keras.Model):
    """A model with steps of its own, which Keras does not build before they are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.f1 = dense(out=3, activation="softmax"), F1OfLabels(name="f1")
        self.error, self.total = LargestError(2.0, "error"), TotalLoss(name="total")

    def build(self, shape: Any) -> None:
        self.recall = keras.metrics.RecallAtPrecision(0.4, name="recall")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def told(self, y: Any, p: Any) -> tuple[Any, dict[str, Any]]:
        loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y[:, 0], p))
        self.f1.update_state(y, p)
        self.recall.update_state(y == 1, p[:, 1:2])
        self.error.update_state(y, p)
        self.total.update_state(loss)
        whole = {"finite": tf.math.is_finite(loss), "low": loss < 1.05, "tenths": tf.cast(loss * 10, "int32")}
        metrics = (self.f1, self.recall, self.error, self.total)
        return loss, whole | {"bare": loss} | {metric.name: metric.result() for metric in metrics}

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss, logs = self.told(y, self(x))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        self.optimizer.apply([])
        return logs

    def test_step(self, batch: Any) -> Any:
        return self.told(batch[1], self(batch[0]))[1]


@scenario
def metrics_made_late_and_truths() -> dict[str, Any]:
    model = MakesMetricsLate()
    model.compile(_O.SGD(0.5))
    x, _ = regression()
    return trained(model, x, np.random.RandomState(1).randint(0, 3, [len(x), 1]))


@scenario
def a_model_that_asks_how_many_rows_there_are() -> dict[str, Any]:
    class Pads(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + tf.zeros([x.shape[0], 1])

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.pads = dense(), Pads()

        def call(self, x: Any) -> Any:
            return self.pads(self.net(x))

    x, _ = regression(32)
    models = [Model(), Model(), keras.Sequential([Pads()])]
    models[0](x[:2])
    return {"predict": [model.predict(x, batch_size=16, verbose=0) for model in models]}


class TellsRows(keras.Model):
    """Its logs have something for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(out=3)

    def call(self, x: Any) -> Any:
        return self.net(x)

    def told(self, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
        found = self(x)
        errors = keras.losses.sparse_categorical_crossentropy(y[:, 0], found, from_logits=True)
        return keras.ops.mean(errors), {"errors": errors, "guess": tf.argmax(found, axis=1)}

    def train_step(self, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, logs = self.told(*batch)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return logs | {"above": logs["errors"] > loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        loss, logs = self.told(*batch)
        return {"word": tf.strings.as_string(logs["guess"]), "place": tf.argsort(tf.argsort(logs["errors"]))}


@scenario
def logs_with_rows() -> dict[str, Any]:
    """The last of three batches has one row."""
    x, _ = regression(37)
    y = np.random.RandomState(1).randint(0, 3, [len(x), 1])
    model = TellsRows()
    model.compile(_O.SGD(0.1))
    seen: list[Any] = []
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    history = model.fit(x, y, batch_size=18, epochs=2, shuffle=False, verbose=0, callbacks=[told]).history
    tested = [model.evaluate(x[:n], y[:n], batch_size=18, verbose=0, return_dict=True) for n in (18, 19)]
    words = [list(map(int, each.pop("word"))) for each in tested]
    return {"seen": seen, "history": history, "tested": tested, "words": words}


class TellsFeatures(keras.Model):
    """Its metrics get what features have in common, which has no rows: correlations of two views, means, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(out=5)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.distance = keras.metrics.MeanSquaredError(name="distance")
        self.confused = keras.metrics.MeanSquaredError(name="confused")
        self.mean, self.listed = keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="listed")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, _ = batch
        with tf.GradientTape() as tape:
            one, other = (_standardized(self(view)) for view in (x, x[:, ::-1]))
            correlations = tf.matmul(one, other, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
            loss = tf.reduce_mean(tf.square(correlations - tf.eye(5)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.accuracy.update_state(tf.range(5), correlations)
        self.distance.update_state(tf.reduce_mean(x, 0)[tf.newaxis], tf.reduce_sum(tf.square(x), 0)[tf.newaxis])
        confusion = tf.math.confusion_matrix(tf.argmax(one, 1), tf.argmax(other, 1), 5)
        self.confused.update_state(tf.eye(5), tf.cast(confusion, tf.float32))
        self.mean.update_state(tf.reduce_max(x, 0), sample_weight=tf.range(4.0))
        self.listed.update_state([loss, tf.reduce_sum(x[:, 0])])
        return {"loss": loss} | {metric.name: metric.result() for metric in self.metrics}


def _standardized(rows: Any) -> Any:
    return (rows - tf.reduce_mean(rows, 0)) / tf.math.reduce_std(rows, 0)


@scenario
def metrics_of_features() -> dict[str, Any]:
    """Correlations of two rows would be 1 or -1, so the last of three batches has more."""
    x, y = regression(42)
    model = TellsFeatures()
    model.compile(_O.SGD(0.1))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}
