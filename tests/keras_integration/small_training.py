"""A small model that trains on few rows, in a process that starts, or starts again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfrep_strategy as tfrep


def make_model(width: int = 3) -> keras.Model:
    """Makes a model whose size depends on `width`."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, kernel_initializer="ones"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def fit(model: Any, epochs: int = 4, *callbacks: Any) -> Any:
    """Trains two steps an epoch, on data that is shuffled."""
    rng = np.random.RandomState(0)
    x, y = rng.randn(16, 4).astype("float32"), rng.randn(16, 1).astype("float32")
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=True, callbacks=list(callbacks))


def state(model: Any) -> list[bytes]:
    """Returns the bits of a model's weights and of its optimizer's variables."""
    return [keras.ops.convert_to_numpy(v).tobytes() for v in model.weights + model.optimizer.variables]


def num_bytes(model: Any) -> int:
    """Counts the bytes of these."""
    return sum(map(len, state(model)))


def mirrored() -> Any:
    """Makes a strategy of two replicas in this process."""
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"])


class Program:
    """A program that can be started again: the model, and the seeds, are as in a new process, but nothing is traced again.

    Args:
        strategy: Under which the model is made.
    """

    def __init__(self, strategy: Any) -> None:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            self.model = make_model()
            self.model.optimizer.build(self.model.trainable_variables)
        self._at_first = [keras.ops.convert_to_numpy(v) for v in self._variables]

    @property
    def _variables(self) -> list[Any]:
        return self.model.variables + self.model.optimizer.variables

    def start(self) -> Any:
        """Returns the model as it is in a process that starts."""
        for variable, value in zip(self._variables, self._at_first, strict=True):
            variable.assign(value)
        self.model._initial_epoch = None
        keras.utils.set_random_seed(3)
        return self.model
