"""Steps that compare the rows of a batch with each other; of the last batch one replica has none."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from scenarios.base import dense, init, regression, scenario, trained

_O = keras.optimizers


def _encoder(seed: int) -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, "tanh", kernel_initializer=init(seed)),
            layers.Dense(5, kernel_initializer=init(seed + 1)),
        ]
    )


class ContrastiveModel(keras.Model):
    """Learns from two views of each row, and a probe from its labels (Chen et al., 2020; after Keras's example of SimCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder(1)
        self.probe = keras.Sequential([keras.Input((5,)), layers.Dense(3, kernel_initializer=init(3))])
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, x: Any) -> Any:
        return self.probe(self.encoder(x))

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any) -> None:
        super().compile()
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.sum_of_losses = keras.metrics.Sum(name="c_sum")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
        similarities = ops.matmul(one, ops.transpose(other)) * ops.exp(self.temperature)
        labels = ops.arange(ops.shape(one)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            for logits in (similarities, ops.transpose(similarities))
        ]
        return (losses[0] + losses[1]) / 2

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(self.encoder(x), self.encoder(x * ops.array([1.0, -1.0, 0.5, 1.0])))
        weights = [*self.encoder.trainable_weights, self.temperature]
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        self.sum_of_losses.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(x, training=False))
            probe_loss = self.probe_loss(y, logits)
        weights = self.probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights, strict=True))
        self.probe_accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, batch: Any) -> Any:
        x, y = batch
        self.contrastive_loss_tracker.update_state(self.contrastive_loss(self.encoder(x), self.encoder(0.5 * x)))
        self.probe_accuracy.update_state(y, self.probe(self.encoder(x)))
        return {metric.name: metric.result() for metric in self.metrics}


@scenario
def contrastive_pretraining() -> dict[str, Any]:
    x, targets = regression(33)
    model = ContrastiveModel()
    model.compile(_O.SGD(0.002, momentum=0.9), _O.SGD(0.1))
    return trained(model, x, (targets[:, 0] > 0).astype("int32") + (targets[:, 0] > 1))


class DualEncoder(keras.Model):
    """Compares captions with images (Radford et al., 2021; after Keras's example of a dual encoder)."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.captions = _encoder(1), _encoder(5)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.images(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def compute_loss(self, captions: Any, images: Any) -> Any:
        logits = tf.matmul(captions, images, transpose_b=True) / 0.5
        alike = tf.matmul(images, images, transpose_b=True) + tf.matmul(captions, captions, transpose_b=True)
        targets = keras.activations.softmax(alike / (2 * 0.5))
        of_captions = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
        of_images = keras.losses.categorical_crossentropy(ops.transpose(targets), ops.transpose(logits), from_logits=True)
        return (of_captions + of_images) / 2  # A number for each row.

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(self.captions(x[:, ::-1]), self.images(x))
            small = 0.01 * ops.sum(ops.square(self.images(x)))
        gradients = tape.gradient([loss, small], self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, batch: Any) -> Any:
        x, _ = batch
        self.loss_tracker.update_state(self.compute_loss(self.captions(x[:, ::-1]), self.images(x)))
        return {"loss": self.loss_tracker.result()}


@scenario
def two_encoders() -> dict[str, Any]:
    model = DualEncoder()
    model.compile(_O.SGD(0.003))
    return trained(model, *regression(33))


class NeighboursInAQueue(keras.Model):
    """Takes the nearest of the features before as the other view (Dwibedi et al., 2021; after Keras's example of NNCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder(1)
        first = np.random.RandomState(3).randn(20, 5).astype("float32")
        self.queue = keras.Variable(first / np.linalg.norm(first, axis=1, keepdims=True), trainable=False)

    def call(self, x: Any) -> Any:
        return self.encoder(x)

    def test_step(self, batch: Any) -> Any:
        x, _ = batch
        one = self.encoder(x)
        return {"loss": ops.mean(ops.square(ops.matmul(one, ops.transpose(one))))}

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        with tf.GradientTape() as tape:
            one, other = (ops.normalize(self.encoder(view), axis=1) for view in (x, x[:, ::-1]))
            nearest = ops.argmax(ops.matmul(one, ops.transpose(self.queue)), axis=1)
            neighbours = one + ops.stop_gradient(ops.take(self.queue, nearest, axis=0) - one)
            logits = ops.matmul(neighbours, ops.transpose(other)) / 0.3
            labels = ops.arange(ops.shape(one)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
            loss += 0.5 * ops.mean(ops.square(neighbours - other))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.queue.assign(ops.concatenate([one, self.queue[: -ops.shape(one)[0]]], axis=0))
        hits = ops.equal(ops.argmax(logits, axis=1), labels)
        return {"loss": loss, "rate": ops.mean(ops.cast(hits, "float32")), "hits": ops.sum(ops.cast(hits, "int32"))}


@scenario
def queue_of_features() -> dict[str, Any]:
    model = NeighboursInAQueue()
    model.build((None, 4))
    model.compile(_O.SGD(0.05))
    return trained(model, *regression(33)) | {"queue": ops.convert_to_numpy(model.queue)}


class Spread(layers.Layer):
    """Adds a loss by which rows repel each other (Wang and Isola, 2020)."""

    def call(self, x: Any) -> Any:
        distances = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)
        self.add_loss(0.1 * ops.log(ops.mean(ops.exp(-2.0 * distances))))
        return x


class HardExamples(keras.Model):
    """Learns from the rows of the batch with the largest losses, and from those that are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([dense(), Spread()])

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        errors = ops.square(y - y_pred)[:, 0]
        count = ops.maximum(ops.shape(x)[0] // 3, 1)
        hard = ops.mean(tf.sort(errors, direction="DESCENDING")[:count])
        marked = tf.boolean_mask(errors, x[:, 0] > -9.0)
        return hard + ops.mean(marked[: ops.shape(marked)[0]]) + ops.median(ops.abs(y_pred)) + sum(self.losses)


class Hits(keras.metrics.Metric):
    """A rate, of whole numbers."""

    def __init__(self) -> None:
        super().__init__(name="rate")
        self.hits, self.rows = (self.add_weight(shape=(), initializer="zeros", name=name) for name in ("hits", "rows"))

    def update_state(self, hits: Any, rows: Any) -> None:
        self.hits.assign_add(ops.cast(hits, "float32"))
        self.rows.assign_add(ops.cast(rows, "float32"))

    def result(self) -> Any:
        return self.hits / ops.maximum(self.rows, 1.0)


class RowsOfLosses(keras.Model):
    """Gives out a loss for each row, which depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rate = dense(), Hits()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        order = ops.argsort(y[:, 0])
        self.rate.update_state(ops.sum(ops.cast(order == ops.argsort(y_pred[:, 0]), "int32")), ops.shape(y)[0])
        return ops.square(y - y_pred)[:, 0] + 0.2 * ops.square(ops.take(y_pred[:, 0], order) - ops.sort(y[:, 0]))


@scenario
def hard_examples() -> dict[str, Any]:
    models = {"own": HardExamples(), "of Keras": keras.Sequential([dense(), Spread()]), "rows": RowsOfLosses()}
    for model in models.values():
        model.compile(_O.SGD(0.02, momentum=0.9), "mse")
    return {name: trained(model, *regression(33)) for name, model in models.items()}


@scenario
def accuracy_within_a_batch() -> dict[str, Any]:
    """Keras's own step calls a `compute_loss` that compares rows, updates metrics with that, and takes a gradient."""

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _encoder(1), _encoder(3)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="within")
            self.share = keras.metrics.Mean(name="share")

        def call(self, x: Any) -> Any:
            return self.first(x), self.second(x)

        def compute_loss(self, x: Any, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True) -> Any:
            similarities = ops.matmul(y_pred[0], ops.transpose(y_pred[1]))
            labels = ops.arange(ops.shape(similarities)[0])
            self.accuracy.update_state(labels, similarities)
            self.share.update_state(ops.mean(y_pred[0]), sample_weight=2.0)
            losses = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
            return ops.mean(losses)

    model = Pairs()
    model.compile(_O.SGD(0.05))
    x, _ = regression(33)
    return trained(model, x, epochs=2)
