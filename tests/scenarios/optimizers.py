"""Optimizers and their options, and mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import SCENARIOS, dense, init, regression, scenario, trained


def _optimizer(name: str, make: Callable[[], Any]) -> None:
    def fn() -> dict[str, Any]:
        model = dense()
        model.compile(make(), "mse", metrics=["mae"])
        return trained(model, *regression())

    SCENARIOS[name] = fn


_O = keras.optimizers
_optimizer("sgd_momentum", lambda: _O.SGD(0.05, momentum=0.9))
_optimizer("adam", lambda: _O.Adam(0.02))
_optimizer("clipnorm", lambda: _O.SGD(0.1, clipnorm=0.1))
_optimizer("clipvalue", lambda: _O.SGD(0.1, clipvalue=0.05))
_optimizer("global_clipnorm", lambda: _O.Adam(0.05, global_clipnorm=0.1))
_optimizer("weight_decay", lambda: _O.AdamW(0.02, weight_decay=0.1))
_optimizer("accumulation", lambda: _O.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2))
_optimizer("accumulation_clipped", lambda: _O.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=4))
_optimizer("ema", lambda: _O.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2))
_optimizer("loss_scale_factor", lambda: _O.SGD(0.1, loss_scale_factor=16.0))
_optimizer("learning_rate_schedule", lambda: _O.SGD(_O.schedules.ExponentialDecay(0.1, 2, 0.5)))


@scenario
def swap_ema_weights() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.1, use_ema=True, ema_momentum=0.7), "mse")
    x, y = regression()
    return trained(model, x, y, validation_data=(x, y), callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])


@scenario
def frozen_variables() -> dict[str, Any]:
    model = dense()
    model.layers[0].trainable = False
    model.compile(_O.Adam(0.05), "mse")
    return trained(model, *regression())


@scenario
def variable_without_gradient() -> dict[str, Any]:
    inputs = keras.Input((4,))
    used = layers.Dense(1, kernel_initializer=init(1))(inputs)
    unused = layers.Dense(1, kernel_initializer=init(2))(inputs)
    model = keras.Model(inputs, [used, unused])
    model.compile(_O.SGD(0.05), ["mse", None])
    x, y = regression()
    model.fit(x, [y, y], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


class OfTensorFlow(_O.Optimizer):
    """Written as for `tf.keras`: it gets TensorFlow's variables, which can scatter, and takes gradients that are slices."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        assert isinstance(variable, tf.Variable)
        rate = tf.cast(learning_rate, variable.dtype.base_dtype)
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
        else:
            variable.assign_sub(rate * gradient + 0.001 * variable.read_value(), use_locking=True)


@scenario
def an_optimizer_written_for_tensorflow() -> dict[str, Any]:
    embedding = layers.Embedding(9, 4, embeddings_initializer=init(1))
    model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, layers.Flatten()])
    model.add(layers.Dense(1, kernel_initializer=init(2)))
    model.compile(OfTensorFlow(0.1), "mse")
    x = np.random.RandomState(0).randint(9, size=(33, 3))
    return trained(model, x, x.sum(1, keepdims=True).astype("float32"))


class AppliesAnIterator(keras.Sequential):
    """Clips its gradients, and updates some of its variables."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        chosen = self.trainable_variables[:2]
        gradients = [tf.clip_by_value(gradient, -0.1, 0.1) for gradient in tape.gradient(loss, chosen)]
        self.optimizer.apply(gradients, (variable for variable in chosen))
        return {"loss": loss}


@scenario
def gradients_applied_to_an_iterator() -> dict[str, Any]:
    first, second = (layers.Dense(n, kernel_initializer=init(n)) for n in (4, 1))
    model = AppliesAnIterator([keras.Input((4,)), first, second])
    model.compile(_O.SGD(0.1))
    history = model.fit(*regression(33), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"weights": model.get_weights(), "history": history, "iterations": int(model.optimizer.iterations)}


@scenario
def mixed_bfloat16() -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = dense()
    model.compile(_O.SGD(0.1), "mse")
    model.fit(*regression(32), batch_size=16, epochs=4, shuffle=False, verbose=0)
    return {"weights_rough": model.get_weights()}


@scenario
def mixed_float16() -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    model.compile(_O.SGD(0.1), "mse", jit_compile=False)
    model.fit(*regression(32), batch_size=16, epochs=4, shuffle=False, verbose=0)
    return {"weights_rough": model.get_weights(), "scale": float(model.optimizer.dynamic_scale)}


@scenario
def float16_overflow_of_a_sum() -> dict[str, Any]:
    """The sum over the rows overflows in half precision, and that over the rows of a replica does not."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2, kernel_initializer="zeros", kernel_regularizer="l2")])
    model.compile(_O.SGD(0.01), "mse", jit_compile=False)
    told = []
    for _ in range(3):
        model.fit(np.ones((12, 5), "float32"), np.full((12, 2), -4.0, "float32"), batch_size=12, verbose=0)
        told.append([float(model.optimizer.dynamic_scale), int(model.optimizer.iterations)])
    return {"told": told}


@scenario
def float16_overflow_on_one_replica() -> dict[str, Any]:
    """Only the last rows overflow, which are those of the last replica: all skip the step, and halve the scale."""
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    model.compile(_O.SGD(0.01), "mse", jit_compile=False)
    x, y = regression(16)
    before = model.get_weights()
    x[-1] = 6e4
    y[-1] = 6e4
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    unchanged = [bool(np.array_equal(a, b)) for a, b in zip(before, model.get_weights(), strict=True)]
    return {"unchanged": unchanged, "scale": float(model.optimizer.dynamic_scale)}


class ClipsWhatItApplies(_O.SGD):
    """Clips before Keras's `apply` sees the gradients, as optimizers do that were written for one device."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(tf.clip_by_norm(gradient, 0.1), variable) for gradient, variable in grads_and_vars])


@scenario
def optimizer_that_clips_before_it_applies() -> dict[str, Any]:
    x, y = regression()
    model = dense()
    model.compile(ClipsWhatItApplies(0.5), "mse")
    return trained(model, x, y)


class PlainStep(keras.Model):
    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@scenario
def float8() -> dict[str, Any]:
    """The scales and the largest values that it keeps are those of one device; numbers of 8 bits round where the batch is cut."""
    results = {}
    for kind, accumulated in ((keras.Model, None), (keras.Model, 2), (PlainStep, None)):
        inputs, (hidden, output) = keras.Input((4,)), dense().layers
        model = kind(inputs, output(hidden(inputs)))
        model.quantize("float8")
        model.compile(_O.SGD(0.05, gradient_accumulation_steps=accumulated), "mse")
        model.fit(*regression(21), batch_size=8, epochs=2, shuffle=False, verbose=0)
        variables = [variable for variable in model.variables if "seed" not in variable.path]
        results[f"{kind.__name__} {accumulated}"] = {"weights_rough": [keras.ops.convert_to_numpy(v) for v in variables]}
    return results


class Noisy(_O.SGD):
    """Adds noise to each update (stochastic gradient Langevin dynamics)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        self.assign_add(variable, 0.01 * keras.random.normal(variable.shape, seed=self.seeds))


@scenario
def noise_in_an_update() -> dict[str, Any]:
    model = dense()
    model.compile(Noisy(0.05), "mse")
    return trained(model, *regression(), epochs=2)


class WithAPenalty(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.01 * keras.ops.sum(keras.ops.square(y_pred))


@scenario
def optimizers_behind_a_compute_loss() -> dict[str, Any]:
    """Keras's own step calls it. A sum that overflows in half precision is found by the loss scale."""
    results = {}
    for name, optimizer in {
        "accumulated": _O.SGD(0.05, gradient_accumulation_steps=2),
        "clipped": _O.Adam(0.05, global_clipnorm=0.1),
        "scaled": _O.LossScaleOptimizer(_O.SGD(0.05), initial_scale=2.0**127, dynamic_growth_steps=3),
    }.items():
        inputs = keras.Input((4,))
        model = WithAPenalty(inputs, dense()(inputs))
        model.compile(optimizer, "mse")
        results[name] = trained(model, *regression(), epochs=2)
    return results
