"""One process of `benchmarks.memory`."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from benchmarks.crews import work
from benchmarks.memory import OUTPUTS

_BATCH, _STEPS = 64, 10
_PREDICTED = 4096


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, float]]:
    """Sets a process up.

    Args:
        settings: "strategy": "none", "mirrored" with "replicas", "stock mirrored", or a communicator, with "chief_only" or not.

    Returns:
        A function that trains ("do": "train") or predicts "rows", and returns what that took.
    """
    models: list[Any] = []

    def answer(question: dict[str, Any]) -> dict[str, float]:
        if question["do"] == "predict":
            return _predict(models[0], question["rows"])
        strategy = _strategy(settings)
        import keras

        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            models.append(_model(keras))
        return _train(keras, models[0])

    return answer


def _strategy(settings: dict[str, Any]) -> Any:
    kind = settings["strategy"]
    if kind == "none":
        return None
    if kind == "stock mirrored":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    import tfrep_strategy as tfrep

    if kind == "mirrored":
        return tfrep.MirroredStrategy(tfrep.use_logical_cpus(settings["replicas"]))
    strategy = tfrep.MultiWorkerStrategy(kind)
    strategy.extended.predictions_on_chief_only = settings.get("chief_only", False)
    return strategy


def _model(keras: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((28, 28, 1))]
    for filters in (16, 32, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", strides=2), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(OUTPUTS)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def _train(keras: Any, model: Any) -> dict[str, float]:
    measured: dict[str, float] = {}

    def after_first_step(batch: int, logs: Any) -> None:
        if not measured:
            measured["first_step_s"] = time.time() - psutil.Process().create_time()
            measured["first_step_cpu_s"] = time.process_time()
            measured["memory_mb"] = _memory_mb()

    x = np.zeros([_BATCH * _STEPS, 28, 28, 1], np.float32)
    y = np.zeros([_BATCH * _STEPS, OUTPUTS], np.float32)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=after_first_step)
    model.fit(x, y, batch_size=_BATCH, verbose=0, callbacks=[callback])
    return {**measured, "epoch_mb": _memory_mb()}


def _predict(model: Any, rows: int) -> dict[str, float]:
    import tensorflow as tf

    # One image over and over: what is measured is what comes out.
    images = tf.data.Dataset.from_tensors(np.zeros([28, 28, 1], np.float32)).repeat(rows).batch(_PREDICTED)
    model.predict(images.take(2), verbose=0)
    before = _memory_mb()
    predictions = model.predict(images, verbose=0)
    predicted, after = len(predictions), _memory_mb()
    del predictions  # What is gone now was held by them. The rest is the pipeline's, and what was freed in small pieces.
    gc.collect()
    dropped = _memory_mb()
    return {
        "predicted_rows": float(predicted),
        "predictions_mb": after - dropped,
        "predict_left_mb": dropped - before,
        "predict_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 * 1.048576 - before,
    }


def _memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


if __name__ == "__main__":
    main()
