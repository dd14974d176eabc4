"""A model that trains with every optimizer, its state sharded or not, and whose files go on with another number of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

_O = keras.optimizers
_NAMES = ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam", "Lion", "ScheduleFreeAdamW",
          "Muon", "Lamb", "Adafactor"]  # fmt: skip
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: functools.partial(getattr(_O, name), 0.01) for name in _NAMES if hasattr(_O, name)
} | {
    "momentum": lambda: _O.SGD(0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda: _O.Adam(0.01, amsgrad=True),
    "clipnorm": lambda: _O.Adam(0.01, clipnorm=0.1),
    "clipvalue": lambda: _O.Adam(0.01, clipvalue=0.01),
    "global_clipnorm": lambda: _O.Adam(0.01, global_clipnorm=0.1),
    "weight_decay": lambda: _O.Lamb(0.01, weight_decay=0.1),
    "loss_scale_factor": lambda: _O.Adam(0.01, loss_scale_factor=1024.0),
    "loss_scale": lambda: _O.LossScaleOptimizer(_O.Adam(0.01), dynamic_growth_steps=2),
    "loss_scale_of_muon": lambda: _O.LossScaleOptimizer(_O.Muon(0.01)),
    "accumulation": lambda: _O.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation_clipped": lambda: _O.Lamb(0.01, gradient_accumulation_steps=2, clipnorm=0.1),
    "accumulation_scaled": lambda: _O.LossScaleOptimizer(_O.Adam(0.01, gradient_accumulation_steps=2)),
    "averages": lambda: _O.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
}
if hasattr(_O, "MultiOptimizer"):
    OPTIMIZERS |= {
        "several": lambda: _several(_O.Adam(0.01), _O.SGD(0.1, momentum=0.9)),
        "several_by_whole_variables": lambda: _several(_O.Lamb(0.01), _O.Muon(0.01)),
        "several_that_clip": lambda: _several(_O.Adam(0.01, global_clipnorm=0.1), _O.SGD(0.1, clipnorm=0.1)),
        "several_in_a_loss_scale": lambda: _O.LossScaleOptimizer(_several(_O.Adam(0.01), _O.SGD(0.1))),
    }


def _several(other: Any, of_kernels: Any) -> Any:
    return _O.MultiOptimizer(_O.OptimizerMap(other, {".*kernel": of_kernels}))


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets whose number no replica count but one divides."""
    draw = np.random.RandomState(0)
    return draw.randint(0, 11, (37, 3)), draw.randn(37, 1).astype("float32")


def made(optimizer: Any, **options: Any) -> keras.Model:
    """Makes a model with sparse gradients, a matrix, vectors, a constraint, and numbers of elements that divide badly."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    words = keras.layers.Embedding(11, 5, embeddings_initializer="glorot_uniform")
    if optimizer.loss_scale_factor is not None:  # Keras cannot divide sparse gradients.
        words = keras.layers.CategoryEncoding(11)
    hidden = keras.layers.Dense(7, "tanh", kernel_constraint=keras.constraints.MaxNorm(1.0))
    hidden = hidden(keras.layers.Flatten()(words(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", **options)
    return model


def fit(model: Any, epochs: int = 1, **options: Any) -> Any:
    return model.fit(*rows(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def state(model: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in model.variables + model.optimizer.variables]


def trained(name: str, builds: bool = False, **options: Any) -> list[np.ndarray]:
    model = made(OPTIMIZERS[name](), **options)
    if builds:
        model.optimizer.build(model.trainable_variables)
    fit(model, 2)
    return state(model)


@functools.cache
def on_one_device(name: str) -> list[np.ndarray]:
    """Trains with plain Keras, whose `fit` forgets how ScheduleFreeAdamW begins unless that was built before."""
    return trained(name, builds=name == "ScheduleFreeAdamW")


def same(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.max(np.abs(b), initial=0.0)))


@functools.cache
def mirrored(size: int) -> Any:
    return tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)], shard_optimizer_state=True)


def sharded(strategy: Any) -> Any:
    """Returns a strategy like that of the pool, but one that shards."""
    from tfrep_strategy.strategies.groups import remember

    if not hasattr(strategy, "_sharded"):
        strategy._sharded = tfrep.MultiWorkerStrategy(strategy.communicator.name, shard_optimizer_state=True)
    remember(strategy._sharded)
    return strategy._sharded


def held(model: Any) -> list[int]:
    """Returns the bytes of the slots that each replica of this process holds."""
    slots = [v.value for v in model.optimizer.variables if hasattr(v.value, "cut")]
    return [sum(copy.numpy().nbytes for copy in copies) for copies in zip(*(slot.values for slot in slots), strict=True)]


def in_scope(strategy: Any, name: str) -> list[np.ndarray]:
    strategy = sharded(strategy)
    with strategy.scope():
        model = made(OPTIMIZERS[name]())
        fit(model, 2)
        strategy.assert_in_sync(model)
        return state(model)


class Interruption(Exception):
    """Ends training in its second epoch."""


class _Interrupts(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise Interruption


def save(folder: str, way: str, name: str) -> None:
    """Trains an epoch, and saves in one way."""
    model = made(OPTIMIZERS[name]())
    if way == "backup":
        with pytest.raises(Interruption):
            fit(model, 2, callbacks=[keras.callbacks.BackupAndRestore(folder), _Interrupts()])
        return
    fit(model)
    match way:
        case "model":
            model.save(f"{folder}/model.keras")
        case "weights":
            model.save_weights(f"{folder}/model.weights.h5")
        case "checkpoint":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/checkpoint")


def go_on(folder: str, way: str, name: str) -> list[np.ndarray]:
    """Loads what was saved, and trains another epoch."""
    if way == "model":
        model = keras.models.load_model(f"{folder}/model.keras")
    else:
        model = made(OPTIMIZERS[name]())
    if way == "backup":
        history = fit(model, 2, callbacks=[keras.callbacks.BackupAndRestore(folder)])
        assert history.epoch == [1], "training began anew"
        return state(model)
    if way in ("weights", "checkpoint"):
        model.optimizer.build(model.trainable_variables)
    if way == "weights":
        model.load_weights(f"{folder}/model.weights.h5")
    if way == "checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(f"{folder}/checkpoint").expect_partial()
    fit(model)
    return state(model)


@functools.cache
def after_two_epochs(name: str) -> list[np.ndarray]:
    model = made(OPTIMIZERS[name]())
    fit(model)
    fit(model)
    return state(model)
