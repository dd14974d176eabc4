"""Steps and layers that call functions of the user's own under `tf.function`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import dense, init, regression, scenario, trained

_O = keras.optimizers


@tf.function
def _sum_of_squares(y: Any, p: Any) -> Any:
    total = tf.reduce_sum(tf.square(y - p))
    if total > 1e9:  # Python is converted here.
        total *= 0.0
    return total


@tf.function
def _contrast(one: Any, other: Any, temperature: Any) -> tuple[Any, float]:
    """The loss of pairs, and a number of Python's."""
    similar = tf.matmul(tf.math.l2_normalize(one, 1), tf.math.l2_normalize(other, 1), transpose_b=True) / temperature
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), similar)), 0.5


class CallsFunctions(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh", kernel_initializer=init(1))])
        self.head = layers.Dense(1, kernel_initializer=init(2))
        self.again = tf.function(self.body)
        self.worst = keras.metrics.Mean(name="worst")

    @tf.function
    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x, training=training))

    @tf.function
    def losses_of(self, x: Any, y: Any) -> dict[str, Any]:
        features = self.body(x, training=True)
        contrast, half = _contrast(features, self.again(x * np.float32(1.1)), np.float32(0.5))
        return {"sum": _sum_of_squares(y, self.head(features)) / 16.0, "contrast": half * contrast}

    @tf.function
    def update(self, gradients: Any) -> Any:
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return norm

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = self.losses_of(x, y)
            loss = tf.add_n(list(losses.values()))
        norm = self.update(tape.gradient(loss, self.trainable_variables))
        self.worst.update_state(_sum_of_squares(y, self(x)))
        return losses | {"loss": loss, "norm": norm, "worst": self.worst.result()}


@scenario
def functions_that_a_step_calls() -> dict[str, Any]:
    model = CallsFunctions()
    model.compile(_O.SGD(0.1))
    x, y = regression(37)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights(), "predict": model.predict(x, verbose=0)}


@scenario
def functions_in_layers() -> dict[str, Any]:
    """Keras's own step calls them."""
    inputs = keras.Input((4,))
    normal = layers.BatchNormalization(synchronized=True)(inputs)

    class Scaled(layers.Layer):
        @tf.function
        def call(self, x: Any) -> Any:
            return tf.math.l2_normalize(x, 1) if tf.shape(x)[1] > 2 else x

    model = keras.Model(inputs, dense()(Scaled()(normal)))
    model.compile(_O.Adam(0.05), "mse", metrics=["mae"])
    x, y = regression(32)
    return trained(model, x, y)
