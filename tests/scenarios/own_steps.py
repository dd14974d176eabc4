"""Steps and loops of one's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import dense, init, regression, scenario, trained

_L = keras.losses
_O = keras.optimizers


@scenario
def custom_train_step() -> dict[str, Any]:
    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    inputs = keras.Input((4,))
    model = Net(inputs, layers.Dense(1, kernel_initializer=init(2))(layers.Dense(4, kernel_initializer=init(1))(inputs)))
    model.compile(_O.SGD(0.05), "mse")
    x, y = regression()
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


@scenario
def scalars_with_weights() -> dict[str, Any]:
    """Metrics of Keras that get a loss and one weight: how many rows there are, or a number of the step's own."""

    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.means = {name: keras.metrics.Mean(name=name) for name in ("by_rows", "by_number")}
            self.sums = {name: keras.metrics.Sum(name=name) for name in ("sum_by_rows", "sum_by_number")}

        @property
        def metrics(self) -> list[Any]:
            return [*self.means.values(), *self.sums.values()]

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            rows = tf.cast(tf.shape(x)[0], tf.float32)
            self.means["by_rows"].update_state(loss, sample_weight=rows)
            self.means["by_number"].update_state(loss, sample_weight=16)
            self.sums["sum_by_rows"].update_state(loss, sample_weight=rows)
            self.sums["sum_by_number"].update_state(loss, sample_weight=16.0)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = keras.Input((4,))
    model = Net(inputs, layers.Dense(1, kernel_initializer=init(2))(inputs))
    model.compile(_O.SGD(0.05))
    x, y = regression(33)
    return {"history": model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history}


class OwnLogs(keras.Model):
    """Logs bare losses beside results of metrics, and uses the old `minimize`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(activation="sigmoid")
        self.auc, self.mean = keras.metrics.AUC(name="area"), keras.metrics.Mean(name="mean_loss")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.auc.update_state(y, self(x))
        self.mean.update_state(loss)
        return {"bare": loss, "auc": self.auc.result(), "mean_loss": self.mean.result()}


@scenario
def logs_of_ones_own() -> dict[str, Any]:
    x, y = regression()
    model = OwnLogs()
    model(x[:1])
    model.compile(_O.SGD(0.1))
    history = model.fit(x, (y > 0).astype("float32"), batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


class ComputesFromResults(keras.Model):
    """Its steps compute logs, and the loss that is trained, from what metrics tell."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(activation="sigmoid")
        self.mean = keras.metrics.Mean(name="mean")
        self.precision, self.recall = keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def told(self, y: Any, p: Any, loss: Any) -> dict[str, Any]:
        self.mean.update_state(loss)
        self.precision.update_state(y, p)
        self.recall.update_state(y, p)
        precision, recall = self.precision.result(), self.recall.result()
        f1 = 2.0 * precision * recall / (precision + recall + 1e-7)
        return {"mean": self.mean.result(), "perplexity": tf.exp(self.mean.result()), "recall": recall, "f1": f1, "bare": loss}

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            p = self(x)
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(y, p))
            logs = self.told(y, p, loss)
            balanced = loss / tf.stop_gradient(self.mean.result())
        gradients, _ = tf.clip_by_global_norm(tape.gradient(balanced, self.trainable_variables), 0.3)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return logs

    def test_step(self, batch: Any) -> Any:
        x, y = batch
        p = self(x)
        return self.told(y, p, tf.reduce_mean(keras.losses.binary_crossentropy(y, p)))


class UnderFunctions(ComputesFromResults):
    @tf.function
    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        if logs["mean"] > 100.0:  # Python is converted there.
            logs["recall"] += 1.0
        return logs

    test_step = tf.function(ComputesFromResults.test_step)


def _computed_from_results(kind: type[ComputesFromResults], **settings: Any) -> dict[str, Any]:
    x, y = regression()
    model = kind()
    model(x[:1])
    model.compile(_O.SGD(0.5), **settings)
    return trained(model, x, (y > 0).astype("float32"))


@scenario
def logs_computed_from_results_of_metrics() -> dict[str, Any]:
    return _computed_from_results(ComputesFromResults)


@scenario
def logs_computed_from_results_eagerly() -> dict[str, Any]:
    return _computed_from_results(ComputesFromResults, run_eagerly=True)


@scenario
def steps_under_functions() -> dict[str, Any]:
    return _computed_from_results(UnderFunctions, steps_per_execution=2)


class LearnedLossWeight(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.log_weight = self.add_weight(shape=(), initializer="zeros", name="log_weight")

    def call(self, x: Any) -> Any:
        outputs = self.net(x)
        self.add_loss(tf.exp(-self.log_weight) * tf.reduce_mean(tf.square(outputs)) + self.log_weight)
        return outputs


def _squared(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


@scenario
def means_over_no_examples() -> dict[str, Any]:
    """A last batch of one row: a loss that is a mean is no number on a replica without rows."""
    x, y = regression(33)
    model = LearnedLossWeight()
    model(x[:1])
    model.compile(_O.SGD(0.05), _squared, metrics=[_squared])
    return trained(model, x, y)


@scenario
def gan_with_hand_written_means() -> dict[str, Any]:
    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, kernel_initializer=init(1))])
            self.critic = dense()

        def compile(self) -> None:
            super().compile()
            self.g_optimizer, self.c_optimizer = _O.Adam(0.02), _O.RMSprop(0.01)

        def train_step(self, real: Any) -> dict[str, Any]:
            noise = real[:, :2]
            with tf.GradientTape() as tape:
                c_loss = tf.reduce_mean(self.critic(self.generator(noise))) - tf.reduce_mean(self.critic(real))
            variables = self.critic.trainable_variables
            self.c_optimizer.apply_gradients(zip(tape.gradient(c_loss, variables), variables, strict=True))
            with tf.GradientTape() as tape:
                g_loss = -tf.reduce_mean(self.critic(self.generator(noise)))
            variables = self.generator.trainable_variables
            self.g_optimizer.apply(tape.gradient(g_loss, variables), variables)
            return {"c_loss": c_loss, "g_loss": g_loss}

    model = Gan()
    model.compile()
    x, _ = regression()
    history = model.fit(x, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"generator": model.generator.get_weights(), "critic": model.critic.get_weights(), "history": history.history}


@scenario
def custom_loop() -> dict[str, Any]:
    """The loop of TensorFlow's guide, with a Keras loss and with a sum divided by the global batch size."""
    strategy = tf.distribute.get_strategy()
    x, y = regression(32)
    results = {}
    for kind in ("keras_loss", "hand_written"):
        model, optimizer = dense(), _O.Adam(0.05)
        per_example, mean = _L.MeanSquaredError(reduction=None), _L.MeanSquaredError()

        hand_written = lambda y, p, losses=per_example: tf.reduce_sum(losses(y, p)) / 16.0  # noqa: E731
        loss_of = mean if kind == "keras_loss" else hand_written

        def step(batch: Any, loss_of: Any = loss_of, model: Any = model, optimizer: Any = optimizer) -> Any:
            bx, by = batch
            with tf.GradientTape() as tape:
                loss = loss_of(by, model(bx, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def train(batch: Any, step: Any = step) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        results[f"losses_{kind}"] = [
            float(train(batch)) for _ in range(2) for batch in strategy.experimental_distribute_dataset(dataset)
        ]
        results[f"weights_{kind}"] = model.get_weights()
    return results


@scenario
def loops_without_run() -> dict[str, Any]:
    """Loops that were written for one device, eager and as a function: two optimizers, state of layers, a metric."""
    x, y = regression()
    inputs = keras.Input((4,))
    normal = layers.BatchNormalization()(layers.Dense(6, use_bias=False, kernel_initializer=init(1))(inputs))
    body = keras.Model(inputs, layers.Dropout(0.3, seed=5)(normal))
    head = dense(6)
    loss, optimizers = _L.MeanSquaredError(), [_O.SGD(0.1, momentum=0.5), _O.Adam(0.02, global_clipnorm=0.5)]
    error = keras.metrics.MeanAbsoluteError()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            found = head(body(x, training=True), training=True)
            value = loss(y, found)
        for optimizer, model in zip(optimizers, (body, head), strict=True):
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        error.update_state(y, found)
        return value

    values = []
    for run in (step, tf.function(step)):
        for a, b in tf.data.Dataset.from_tensor_slices((x, y)).batch(16):
            values.append(float(run(a, b)))
    weights = [*body.get_weights(), *head.get_weights()]
    return {"values": values, "weights": weights, "error": float(error.result()), "found": head(body(x)).numpy()}


@scenario
def sparse_gradients_without_run() -> dict[str, Any]:
    accumulating, squaring = _O.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2), _O.Adagrad(0.1)
    weights = []
    for optimizer in (accumulating, squaring):
        table = layers.Embedding(7, 2, embeddings_initializer=init(1))
        table.build()
        for words in np.array([[1, 2, 2], [6, 0, 1], [3, 3, 3], [1, 5, 6]]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(table(words) - 1.0))
            optimizer.apply(tape.gradient(loss, table.trainable_weights), table.trainable_weights)
        weights += table.get_weights()
    return {"tables": weights}


@scenario
def logs_of_several_numbers() -> dict[str, Any]:
    """Counts, sums, means and quotients for each class."""

    class PerClass(keras.Model):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, predicted := self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            classes = keras.ops.cast(y > keras.ops.convert_to_tensor([-1.0, 0.0, 1.0]), "float32")
            counts, errors = keras.ops.sum(classes, axis=0), keras.ops.abs(predicted - y)
            return {
                "loss": loss,
                "counts": counts,
                "whole": keras.ops.sum(keras.ops.cast(classes, "int32"), axis=0),
                "error": keras.ops.sum(classes * errors, axis=0) / keras.ops.maximum(counts, 1.0),
                "mean": keras.ops.mean(predicted * classes, axis=0),
                "largest": keras.ops.max(errors * classes, axis=0),
            }

    inputs = keras.Input((4,))
    model = PerClass(inputs, dense()(inputs))
    model.compile(_O.SGD(0.05), "mse")
    x, y = regression()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


@scenario
def checked_numbers() -> dict[str, Any]:
    """A check that passes a sum on makes no mean of it."""

    class Checked(keras.Model):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                errors = tf.debugging.check_numerics(tf.square(self(x, training=True) - y), "errors")
                total = tf.debugging.check_numerics(tf.reduce_sum(errors) / 64.0, "total")
                loss = tf.ensure_shape(total, []) + tf.debugging.check_numerics(0.1 * tf.reduce_mean(errors), "mean")
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "quotient": tf.debugging.check_numerics(tf.reduce_sum(errors), "sum") / tf.norm(total)}

    inputs = keras.Input((4,))
    model = Checked(inputs, dense()(inputs))
    model.compile(_O.SGD(0.05))
    x, y = regression()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}
