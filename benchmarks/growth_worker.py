"""One process of `benchmarks.growth`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from benchmarks.crews import work

_ROWS, _WIDTH, _BATCH, _EPOCHS = 1024, 50_000, 64, 4
"""Of the arrays: 205 MB, of which an epoch reads each row once, in steps of 13 MB."""
_STEPS = 200
"""Of the epochs with and without a callback."""


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, float]]:
    """Sets a process up.

    Args:
        settings: "communicator": the transport; None for plain Keras.

    Returns:
        A function that takes what to "do" ("arrays", "checkpoint" or "callback") and a "folder", and returns what that took here.
    """
    strategy = None
    if settings["communicator"] is not None:
        import tfrep_strategy as tfrep

        strategy = tfrep.MultiWorkerStrategy(settings["communicator"])
    models: dict[str, Any] = {}

    def answer(question: dict[str, Any]) -> dict[str, float]:
        what = question["do"]
        if what not in models:
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                models[what] = _MODELS[what]()
        return _MEASURES[what](models[what], question["folder"])

    return answer


class FirstNumbers(keras.layers.Layer):
    """Computes next to nothing with rows that are long, and counts their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def count(rows: np.ndarray) -> None:
            self.most_bytes = max(self.most_bytes, int(rows) * _WIDTH * 4)

        tf.numpy_function(count, [tf.shape(x)[0]], [])
        return x[:, :4]

    def compute_output_shape(self, shape: tuple[int | None, int]) -> tuple[int | None, int]:
        return shape[0], 4


def _long_rows() -> Any:
    return _compiled([keras.Input((_WIDTH,)), FirstNumbers(), keras.layers.Dense(1)], "sgd")


def _of_arrays(model: Any, folder: str) -> dict[str, float]:
    x, y = np.ones([_ROWS, _WIDTH], np.float32), np.zeros([_ROWS, 1], np.float32)

    def cpu_seconds(epochs: int) -> float:
        before = time.process_time()
        model.fit(x, y, batch_size=_BATCH, epochs=epochs, verbose=0)
        return time.process_time() - before

    one, several = cpu_seconds(1), cpu_seconds(1 + _EPOCHS)  # What a `fit` begins with, both have.
    return {"cpu_s": (several - one) / _EPOCHS, "mb": model.layers[0].most_bytes / 1e6}


def _large() -> Any:
    layers = [keras.layers.Dense(1500, activation="relu") for _ in range(3)]
    model = _compiled([keras.Input((784,)), *layers, keras.layers.Dense(10)], "adam")
    model.fit(np.zeros([64, 784], np.float32), np.zeros([64, 10], np.float32), batch_size=64, verbose=0)
    return model


def _of_checkpoint(model: Any, folder: str) -> dict[str, float]:
    before, began = psutil.Process().io_counters().write_chars, time.perf_counter()
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/checkpoint")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "written_mb": (psutil.Process().io_counters().write_chars - before) / 1e6}


def _tiny() -> Any:
    return _compiled([keras.Input((32,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)], "sgd")


def _of_callback(model: Any, folder: str) -> dict[str, float]:
    x, y = np.zeros([_STEPS * _BATCH, 32], np.float32), np.zeros([_STEPS * _BATCH, 1], np.float32)
    seen = []
    watches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))

    def seconds(callbacks: list[Any]) -> np.ndarray:
        before = np.array([time.perf_counter(), time.process_time()])
        model.fit(x, y, batch_size=_BATCH, verbose=0, callbacks=callbacks)
        return np.array([time.perf_counter(), time.process_time()]) - before

    without, with_it = seconds([]), seconds([watches])
    ms, cpu_ms = 1000 * (with_it - without) / _STEPS
    return {"ms": float(ms), "cpu_ms": float(cpu_ms)}


def _compiled(layers: list[Any], optimizer: str) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


_MODELS = {"arrays": _long_rows, "checkpoint": _large, "callback": _tiny}
_MEASURES = {"arrays": _of_arrays, "checkpoint": _of_checkpoint, "callback": _of_callback}


if __name__ == "__main__":
    main()
