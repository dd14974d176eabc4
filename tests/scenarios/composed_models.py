"""The conformance matrix, further: models that are put together, or trained, in ways of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfrep_strategy as tfrep
from scenarios.base import dense, init, regression
from scenarios.models import Rows, Seeds, model, rows, words


@model
def siamese() -> tuple[Any, Rows]:
    tower = dense(4, 3)
    a, b = keras.Input((4,)), keras.Input((4,))
    outputs = layers.Dense(1, kernel_initializer=init(3))(layers.Subtract()([tower(a), tower(b)]))
    x, y = rows(4)
    return keras.Model([a, b], outputs), ([x, x[::-1].copy()], y)


@model
def nested() -> tuple[Any, Rows]:
    class Inner(keras.Model):
        def __init__(self, units: int, seed: int) -> None:
            super().__init__()
            self.hidden = layers.Dense(units, "tanh", kernel_initializer=init(seed))

        def call(self, x: Any) -> Any:
            return ops.concatenate([x, self.hidden(x)], axis=-1)

    return keras.Sequential([keras.Input((3,)), Inner(2, 1), Inner(3, 2), dense(8)]), rows(3)


@model
def autoencoder_with_add_loss() -> tuple[Any, Rows]:
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
def gated_mixture() -> tuple[Any, Rows]:
    seeds = Seeds()
    inputs = keras.Input((4,))
    gates = layers.Dense(3, "softmax", kernel_initializer=seeds())(inputs)
    experts = layers.EinsumDense("bi,iej->bej", (3, 2), bias_axes="ej", kernel_initializer=seeds())(inputs)
    mixed = layers.Dot((1, 1))([gates, experts])
    return keras.Model(inputs, layers.Dense(1, kernel_initializer=seeds())(mixed)), rows(4)


@model
def low_rank_adaptation() -> tuple[Any, Rows]:
    built = dense()
    built.layers[0].enable_lora(2, a_initializer=init(5), b_initializer=init(6))
    return built, rows(4)


@model
def adapted_preprocessing() -> tuple[Any, Rows]:
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
def unit_normalized_metric_learning() -> tuple[Any, Rows]:
    """A loss class of one's own, and cosine similarity as a metric."""

    class Margin(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.relu(0.9 - ops.sum(y_true * y_pred, axis=-1))

    built = keras.Sequential([keras.Input((4,)), layers.Dense(3, kernel_initializer=init(1)), layers.UnitNormalization()])
    built.compile(keras.optimizers.SGD(0.1), Margin(), metrics=[keras.metrics.CosineSimilarity(name="cosine")])
    x, y = rows(4, out=3)
    return built, (x, y / np.linalg.norm(y, axis=1, keepdims=True))


@model
def quantile_heads() -> tuple[Any, Rows]:
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


@model
def constrained() -> tuple[Any, Rows]:
    """Constraints on weights after each update, and penalties on what layers give out."""
    body = [
        keras.Input((4,)),
        layers.Dense(5, "tanh", kernel_initializer=init(1), kernel_constraint=keras.constraints.MaxNorm(0.6)),
        layers.ActivityRegularization(l1=0.02, l2=0.01),
        layers.Dense(3, kernel_initializer=init(2), kernel_constraint="unit_norm", activity_regularizer="l2"),
        layers.Dense(1, kernel_initializer=init(3), bias_constraint="non_neg", bias_regularizer="l1"),
    ]
    return keras.Sequential(body), rows(4)


@model
def categories() -> tuple[Any, Rows]:
    """Columns of a table by name: strings, numbers in bins, crossed."""
    inputs = {"city": keras.Input((1,), dtype="string"), "age": keras.Input((1,))}
    city = layers.StringLookup(vocabulary=["bern", "oslo", "rome"], output_mode="one_hot")(inputs["city"])
    age = layers.Discretization([-0.5, 0.5], output_mode="int")(inputs["age"])
    known = layers.StringLookup(vocabulary=["bern", "oslo", "rome"])(inputs["city"])
    crossed = layers.HashedCrossing(8)([known, age])
    joined = [
        city,
        layers.Flatten()(layers.Embedding(3, 2, embeddings_initializer=init(1))(age)),
        layers.Flatten()(layers.Embedding(8, 2, embeddings_initializer=init(2))(crossed)),
    ]
    outputs = layers.Dense(1, kernel_initializer=init(3))(layers.Concatenate()(joined))
    x, y = rows(1)
    cities = np.array(["rome", "oslo", "bern", "unknown"])[words(1, 4)]
    return keras.Model(inputs, outputs), ({"city": tf.constant(cities), "age": x}, y)


@model
def texts() -> tuple[Any, Rows]:
    """Sentences as they are; the model itself cuts them into words."""
    cut = layers.TextVectorization(output_sequence_length=4, vocabulary=["red", "green", "blue"])
    body = [
        keras.Input((), dtype="string"),
        cut,
        layers.Embedding(5, 3, mask_zero=True, embeddings_initializer=init(1)),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, kernel_initializer=init(2)),
    ]
    written = np.array(["", "red", "green", "blue", "pink"])[words(4, 5)]
    return keras.Sequential(body), (tf.constant([" ".join(w) for w in written]), rows(1)[1])


@model
def distilled() -> tuple[Any, Rows]:
    """A student that learns from a frozen teacher in a `train_step` of its own, with metrics of its own."""

    class Distiller(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = dense(out=3, activation="softmax"), dense(out=3, activation="softmax")
            self.teacher.trainable = False
            self.distance = keras.metrics.KLDivergence(name="distance")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.student(x, training=training)

        def train_step(self, data: Any) -> Any:
            x, y = data
            wanted = self.teacher(x, training=False)
            with tf.GradientTape() as tape:
                found = self.student(x, training=True)
                loss = self.compute_loss(x, y, found)
                loss += 0.5 * keras.losses.KLDivergence()(wanted, found)
            gradients = tape.gradient(loss, self.student.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables, strict=True))
            self.distance.update_state(wanted, found)
            return self.compute_metrics(x, y, found) | {"distance": self.distance.result()}

    built = Distiller()
    built.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return built, (rows(4)[0], words(1, 3)[:, 0])


@model
def contrastive() -> tuple[Any, Rows]:
    """Two views of a row find each other among all rows of the global batch: the loss gathers them."""

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = dense(out=3)

        def call(self, x: Any) -> Any:
            return self.encoder(x)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            own = ops.normalize(y_pred, axis=-1)
            others = tfrep.all_gather(ops.normalize(self.encoder(y), axis=-1))
            first = tfrep.all_gather(ops.shape(own)[0], stack=True)[: tfrep.replica_id()]
            pair = ops.arange(ops.shape(own)[0]) + ops.sum(first)
            logits = 3.0 * own @ ops.transpose(others)
            return ops.mean(ops.sparse_categorical_crossentropy(pair, logits, from_logits=True))

    built = Pairs()
    built.compile(keras.optimizers.SGD(0.1))
    x = rows(4)[0]
    return built, (x, x[:, ::-1].copy())


@model
def methods_of_ones_own() -> tuple[Any, Rows]:
    """`compute_loss` and `compute_metrics` of its own, which call those of Keras."""

    class Watched(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = dense()
            self.largest = keras.metrics.MeanSquaredError(name="largest")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.body(x, training=training)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(x, y, y_pred, *args, **kwargs) + 0.1 * ops.mean(ops.square(y_pred))

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            self.largest.update_state(y, y_pred)
            return logs | {"largest": self.largest.result()}

    built = Watched()
    built.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return built, rows(4)


@model
def shared_layers_and_operations() -> tuple[Any, Rows]:
    """One layer called three times, joined by bare operations on symbolic tensors."""
    again = layers.Dense(4, kernel_initializer=init(1))
    inputs = keras.Input((4,))
    once = ops.tanh(again(inputs))
    twice = ops.sigmoid(again(once)) * inputs
    thrice = layers.Lambda(lambda x: x[:, ::-1])(again(ops.concatenate([once[:, :2], twice[:, 2:]], axis=-1)))
    outputs = ops.sum(ops.einsum("bi,bj->bij", once, thrice), axis=(1, 2))[:, None]
    return keras.Model(inputs, outputs), rows(4)
