"""Small Keras programs, each of which must give under a strategy what it gives on one device.

A scenario is a function without arguments. It runs inside a strategy's scope, or in none, and returns what is to be
compared: a dictionary of arrays, numbers and lists. It never asks where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(fn: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Registers a scenario under its name."""
    SCENARIOS[fn.__name__] = fn
    return fn


def run(name: str) -> dict[str, Any]:
    """Runs a scenario with seeds set."""
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("float32")
    try:
        return SCENARIOS[name]()
    finally:
        keras.config.set_dtype_policy("float32")


def init(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


def regression(n: int = 37, d: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets whose number no replica count but one divides."""
    rng = np.random.RandomState(0)
    x = rng.randn(n, d).astype("float32")
    return x, (x @ rng.randn(d, 1) + 0.5 * np.sin(3 * x[:, :1])).astype("float32")


def dense(d: int = 4, out: int = 1, activation: str | None = None) -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((d,)),
            layers.Dense(8, "tanh", kernel_initializer=init(1)),
            layers.Dense(out, activation, kernel_initializer=init(2)),
        ]
    )


def trained(model: Any, x: Any, y: Any = None, *, epochs: int = 3, batch_size: int | None = 16, **kwargs: Any) -> dict[str, Any]:
    """Fits, evaluates and predicts, and returns all that came out."""
    shuffle = kwargs.pop("shuffle", False)
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=shuffle, verbose=0, **kwargs)
    weight = kwargs.get("sample_weight")
    return {
        "weights": model.get_weights(),
        "optimizer": [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables],
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=batch_size, sample_weight=weight, verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
    }
