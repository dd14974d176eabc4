"""How long epochs take, and the devices on which they are timed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.strategies.mirrored import use_logical_cpus


class EpochClock(keras.callbacks.Callback):
    """Times the epochs of `fit`, without the validation after each.

    Attributes:
        seconds: The duration of each epoch.

    Example:
        >>> clock = EpochClock()
        >>> history = make_model().fit(x, y, epochs=3, verbose=0, callbacks=[clock])
        >>> len(clock.seconds), clock.examples_per_second(len(x)) > 0
        (3, True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = self._last_batch = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last_batch = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(self._last_batch - self._start)

    def examples_per_second(self, examples: int) -> float:
        """Returns the throughput: the median over the epochs without the first, which compiles.

        Args:
            examples: How many examples an epoch has.

        Raises:
            ConfigurationError: Fewer than two epochs were timed.
        """
        check_count("At least two epochs are needed: the first compiles, and is not counted.", 2, epochs=len(self.seconds))
        return examples / statistics.median(self.seconds[1:])


def replica_devices(n: int) -> list[str]:
    """Returns the devices of `n` replicas: GPUs if there are enough, else logical CPUs that share the cores.

    Fewer GPUs than replicas are hidden, since all replicas need devices of one kind. Call it before TensorFlow is used.

    Args:
        n: How many replicas.

    Returns:
        Names such as `["GPU:0", "GPU:1"]`, for `MirroredStrategy`.

    Raises:
        ConfigurationError: TensorFlow was initialized before with other devices.

    Example:
        >>> replica_devices(2)
        ['CPU:0', 'CPU:1']
    """
    check_count("At least one replica is needed.", n=n)
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= n:
        return [f"GPU:{i}" for i in range(n)]
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:
        hint = "restart the kernel, and call replica_devices first."
        raise ConfigurationError(message("TensorFlow uses its GPUs already.", hint=hint, n=n)) from error
    return use_logical_cpus(n)
