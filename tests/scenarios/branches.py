"""Steps that decide by what they have computed from rows: in branches, and by truths."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scenarios.base import dense, regression, scenario

_O = keras.optimizers


class Branches(keras.Model):
    """Decides by its loss whether it learns, counts or takes another step. Parts of a batch have losses of their own."""

    def __init__(self, decides: Any) -> None:
        super().__init__()
        self.net, self.decides = dense(), decides
        self.large = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="large")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - y)
            loss = tf.reduce_mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)

        def learns(factor: float) -> Any:
            scaled = [factor * gradient for gradient in gradients]
            return lambda: self.optimizer.apply(scaled, self.trainable_variables) or tf.constant(factor)

        def counts() -> Any:
            self.large.assign_add(1)
            return tf.constant(0.0)

        return {"loss": loss, "taken": self.decides(loss, errors, learns, counts)}


def _branches(decides: Any) -> dict[str, Any]:
    x, y = regression(40)
    y *= np.where(np.arange(40) % 16 < 7, 0.1, 1.0)[:, np.newaxis].astype("float32")
    model = Branches(decides)
    model(x[:1])
    model.compile(_O.SGD(0.2))
    history = model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    assert 0 < int(model.large.numpy()) < 12, "both branches are taken"
    return {"weights": model.get_weights(), "history": history.history}


@scenario
def updates_if_the_loss_is_large() -> dict[str, Any]:
    return _branches(lambda loss, errors, learns, counts: tf.cond(loss > 1.2, learns(1.0), counts))


@scenario
def updates_if_an_error_is_large() -> dict[str, Any]:
    def decides(loss: Any, errors: Any, learns: Any, counts: Any) -> Any:
        return keras.ops.cond(tf.reduce_max(errors) > 4.5, learns(1.0), counts)

    return _branches(decides)


@scenario
def updates_of_several_kinds() -> dict[str, Any]:
    """A branch in a branch, and one of several."""

    def decides(loss: Any, errors: Any, learns: Any, counts: Any) -> Any:
        which, is_huge = tf.cast(loss > 1.8, tf.int32) + tf.cast(loss > 1.2, tf.int32), loss > 2.0
        first = tf.switch_case(which, [counts, learns(0.5), learns(1.0)])
        second = tf.cond(loss > 1.2, lambda: tf.cond(is_huge, learns(0.1), counts), lambda: tf.constant(0.0))
        return first + second

    return _branches(decides)


@scenario
def truths_of_rows() -> dict[str, Any]:
    """Whether any row, or all, are of a kind: in a loss, in logs, in state and in branches."""

    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.bad, self.kept = (self.add_weight(shape=(), initializer="zeros", trainable=False, name=n) for n in "bk")

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                errors = tf.square(self(x, training=True) - y)
                large = tf.cast(errors > 6.0, tf.float32)
                of_large = tf.reduce_sum(errors * large) / (tf.reduce_sum(large) + 1e-6)
                loss = tf.where(tf.reduce_any(errors > 6.0), of_large, tf.reduce_mean(errors))
            any_large, all_small = tf.reduce_any(errors > 6.5), tf.reduce_all(errors < 5.4)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.bad.assign_add(tf.cast(any_large, tf.float32))
            tf.cond(all_small, lambda: self.kept.assign_add(1.0), lambda: tf.identity(self.kept))
            return {"loss": loss, "any": any_large, "all": all_small, "either": tf.cast(any_large | all_small, tf.float32)}

    inputs = keras.Input((4,))
    model = Net(inputs, dense()(inputs))
    model.compile(_O.SGD(0.02))
    x, y = regression(40)
    order = np.argsort(np.abs(y[:, 0]))
    x, y = x[order], y[order]
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    assert 0 < float(model.bad.numpy()) < 9
    assert 0 < float(model.kept.numpy()) < 9
    return {"weights": model.get_weights(), "history": history}


@scenario
def branches_of_metrics() -> dict[str, Any]:
    """A metric that keeps the largest error of steps whose loss is large."""

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.error = self.add_weight(shape=(), initializer="zeros", name="error")

        def update_state(self, y_true: Any, y_pred: Any, limit: Any) -> None:
            largest = tf.maximum(self.error, tf.reduce_max(tf.abs(y_true - y_pred)))
            tf.cond(limit > 1.0, lambda: self.error.assign(largest), lambda: tf.identity(self.error))

        def result(self) -> Any:
            return self.error + 0.0

    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.largest = Largest()

        @property
        def metrics(self) -> list[Any]:
            return [self.largest]

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                outputs = self(x, training=True)
                loss = tf.reduce_mean(tf.square(outputs - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.largest.update_state(y, outputs, loss)
            return {"largest": self.largest.result(), "loss": loss}

    inputs = keras.Input((4,))
    model = Net(inputs, dense()(inputs))
    model.compile(_O.SGD(0.05))
    x, y = regression(40)
    return {"history": model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history}
