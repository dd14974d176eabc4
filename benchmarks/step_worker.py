"""One process of `benchmarks.step`. Imports only what its variant needs, so that peers run as their users run them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.crews import work

_WARM_UP_STEPS = 3


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], float | list[float]]:
    """Sets a process up.

    Args:
        settings: "strategy": see `_strategies`; "batch_statistics": a setting of it; "jit_compile": what `compile` gets;
            "synchronized": what batch normalization gets; "own_part_of": among how many processes a batch is cut; "in_step":
            whether these wait for each other after each step.

    Returns:
        A function that trains for one epoch and returns the seconds per step; with "each" in the question, those of every step but
        the first.
    """
    strategy = _strategies[settings["strategy"]](**{k: v for k, v in settings.items() if k == "batch_statistics"})
    if settings.get("legacy_keras"):
        import tf_keras as keras
    else:
        import keras
    size = settings.get("own_part_of", 1)
    models: dict[str, Any] = {}
    callbacks = [_waits_for_others(keras)] if settings.get("in_step") else []

    def train(question: dict[str, Any]) -> float | list[float]:
        name, steps, batch = question["name"], question["steps"], question["batch"] // size
        if name not in models:
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                net = {key: question[key] for key in ("widths", "filters", "normalized") if key in question}
                models[name] = make_model(keras, synchronized=settings.get("synchronized", False), **net)
                models[name].compile(
                    _optimizer(keras, settings["strategy"]),
                    "sparse_categorical_crossentropy",
                    jit_compile=settings["jit_compile"],
                )
            _epoch_seconds(keras, models[name], question["widths"], batch, _WARM_UP_STEPS, callbacks)
        if question.get("each"):
            ends: list[float] = []
            clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
            _epoch_seconds(keras, models[name], question["widths"], batch, steps, [*callbacks, clock])
            return np.diff(ends).tolist()
        return _epoch_seconds(keras, models[name], question["widths"], batch, steps, callbacks) / steps

    return train


def make_model(
    keras: Any, widths: Sequence[int], filters: Sequence[int] = (), normalized: bool = False, synchronized: bool = False
) -> Any:
    """Makes one of the nets of `benchmarks.step`.

    Args:
        keras: Keras, or the Keras of before.
        widths: Of the inputs, of the dense layers, and of the outputs.
        filters: Of the convolutions before them, with strides of 2.
        normalized: Whether each of these is followed by batch normalization; only the first has strides then.
        synchronized: What batch normalization gets.
    """
    keras.utils.set_random_seed(0)
    layers = []
    if filters:
        layers.append(keras.layers.Reshape((28, 28, 1)))
        if normalized:
            for i, n in enumerate(filters):
                convolution = keras.layers.Conv2D(n, 3, strides=1 if i else 4, padding="same", use_bias=False)
                layers += [convolution, keras.layers.BatchNormalization(synchronized=synchronized), keras.layers.ReLU()]
        else:
            layers += [keras.layers.Conv2D(n, 3, strides=2, activation="relu") for n in filters]
        layers.append(keras.layers.Flatten())
    layers += [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    return keras.Sequential([keras.Input((widths[0],)), *layers, keras.layers.Dense(widths[-1], activation="softmax")])


def _optimizer(keras: Any, strategy: str) -> Any:
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if strategy != "horovod":
        return optimizer
    import horovod.tensorflow.keras as hvd

    return hvd.DistributedOptimizer(optimizer)


def _waits_for_others(keras: Any) -> Any:
    from tfrep_strategy.cluster.environments import detect_environment
    from tfrep_strategy.communicators.shared_memory import SharedMemoryCommunicator

    communicator = SharedMemoryCommunicator(detect_environment())
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: communicator.barrier())


def _epoch_seconds(keras: Any, model: Any, widths: list[int], batch: int, steps: int, callbacks: Sequence[Any]) -> float:
    random = np.random.default_rng(0)
    x = random.standard_normal((batch * steps, widths[0]), np.float32)
    y = random.integers(widths[-1], size=batch * steps)
    times = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs: times.append(time.perf_counter()),
    )
    model.fit(x, y, batch_size=batch, epochs=1, verbose=0, callbacks=[clock, *callbacks])
    return times[1] - times[0]


# How each variant is set up by those who use it.


def _ours_mirrored(replicas: int, **settings: Any) -> Any:
    import tensorflow as tf

    import tfrep_strategy as tfrep

    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= replicas:
        return tfrep.MirroredStrategy([f"GPU:{i}" for i in range(replicas)], **settings)
    return tfrep.MirroredStrategy(tfrep.use_logical_cpus(replicas), **settings)


def _ours_multi_worker(communicator: str, **settings: Any) -> Any:
    import tfrep_strategy as tfrep

    return tfrep.MultiWorkerStrategy(communicator, **settings)


def _stock_mirrored() -> Any:
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _stock_multi_worker() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def _horovod() -> None:
    import horovod.tensorflow.keras as hvd

    hvd.init()


_strategies: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ours, 1 mirrored": functools.partial(_ours_mirrored, 1),
    "ours, mirrored": functools.partial(_ours_mirrored, 2),
    "ours, auto": functools.partial(_ours_multi_worker, "auto"),
    "ours, horovod": functools.partial(_ours_multi_worker, "horovod"),
    "ours, tf": functools.partial(_ours_multi_worker, "tf"),
    "ours, shared_memory": functools.partial(_ours_multi_worker, "shared_memory"),
    "stock mirrored": _stock_mirrored,
    "stock multi-worker": _stock_multi_worker,
    "horovod": _horovod,
}


if __name__ == "__main__":
    main()
