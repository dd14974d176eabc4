"""Steps that learn how much each row counts, by a gradient that passes through another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from scenarios.base import init, scenario
from scenarios.own_gradients import fitted


def _found(w: Any, x: Any) -> Any:
    return tf.tanh(x @ w[0] + w[1]) @ w[2] + w[3]


def _errors(w: Any, x: Any, y: Any) -> Any:
    return tf.square(_found(w, x) - y)[:, 0]


def _reweighted(mean: Callable[[Any], Any]) -> dict[str, Any]:
    """The step of Ren et al., "Learning to Reweight Examples for Robust Deep Learning" (2018).

    Args:
        mean: Makes of weighted errors of rows what the inner step descends.
    """

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        variables = model.trainable_variables
        counts = tf.zeros_like(y[:, 0])
        with tf.GradientTape() as outer:
            outer.watch(counts)
            with tf.GradientTape() as inner:
                loss = mean(counts * _errors(variables, x, y))
            gradients = inner.gradient(loss, variables)
            w = [variable - 0.5 * gradient for variable, gradient in zip(variables, gradients, strict=True)]
            later = tf.reduce_mean(_errors(w, x[::-1], y[::-1]))
        counts = tf.nn.relu(-outer.gradient(later, counts))
        counts /= tf.reduce_sum(counts) + 1e-6
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(counts * _errors(variables, x, y))
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "later": later, "counts": counts}

    return fitted(step)


@scenario
def rows_weighed_by_an_inner_gradient_of_a_mean() -> dict[str, Any]:
    return _reweighted(tf.reduce_mean)


@scenario
def rows_weighed_by_an_inner_gradient_of_a_sum() -> dict[str, Any]:
    return _reweighted(tf.reduce_sum)


@scenario
def rows_weighed_by_a_network() -> dict[str, Any]:
    """The step of Shu et al., "Meta-Weight-Net" (2019)."""
    hidden = layers.Dense(4, "tanh", kernel_initializer=init(4))
    weigh = keras.Sequential([keras.Input((1,)), hidden, layers.Dense(1, "sigmoid", kernel_initializer=init(5))])
    optimizer = keras.optimizers.SGD(0.5)

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        variables = model.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                errors = _errors(variables, x, y)
                loss = tf.reduce_mean(weigh(errors[:, tf.newaxis])[:, 0] * errors)
            gradients = inner.gradient(loss, variables)
            w = [variable - 0.5 * gradient for variable, gradient in zip(variables, gradients, strict=True)]
            later = tf.reduce_mean(_errors(w, x[::-1], y[::-1]))
        optimizer.apply(outer.gradient(later, weigh.trainable_variables), weigh.trainable_variables)
        with tf.GradientTape() as tape:
            errors = _errors(variables, x, y)
            loss = tf.reduce_mean(tf.stop_gradient(weigh(errors[:, tf.newaxis])[:, 0]) * errors)
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "later": later}

    return fitted(step) | {"weigh": weigh.get_weights()}
