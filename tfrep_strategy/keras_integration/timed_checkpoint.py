"""A checkpoint by the clock, for epochs that take hours."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import keras

from tfrep_strategy.errors import ConfigurationError, check_seconds, message
from tfrep_strategy.keras_integration.finding import driver_of_model
from tfrep_strategy.keras_integration.shared.files import written_whole
from tfrep_strategy.keras_integration.shared.model_files import num_bytes

_SUFFIX = ".weights.h5"


class TimedCheckpoint(keras.callbacks.Callback):
    """Saves the weights when a step begins and enough time has passed since the last time.

    Under a parameter-server strategy the workers go on meanwhile: what is saved is the weights as they are read, one after
    the other. A file is complete as soon as it has its name.

    Args:
        filepath: Where to save. It ends in ".weights.h5", and may contain "{epoch}", which is replaced by the number of
            epochs begun.
        seconds: How much time passes between two checkpoints.

    Raises:
        ConfigurationError: A setting cannot be used; when training begins, a strategy of several processes, whose clocks
            would not agree.

    Example:
        >>> checkpoint = tfrep.TimedCheckpoint("checkpoints/ckpt-{epoch}.weights.h5", seconds=600)
        >>> history = make_model().fit(x, y, callbacks=[checkpoint], verbose=0)
    """

    supports_remote_logs = True

    def __init__(self, filepath: str | os.PathLike[str], *, seconds: float = 600.0) -> None:
        super().__init__()
        if not str(filepath).endswith(_SUFFIX):
            raise ConfigurationError(
                message("A checkpoint holds weights.", hint=f'end its name in "{_SUFFIX}".', filepath=str(filepath))
            )
        check_seconds(seconds=seconds)
        self.filepath = str(filepath)
        self.seconds = seconds
        self._epoch = 0
        self._saved_at = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        driver = driver_of_model(self.model)
        processes = driver.num_processes() if driver is not None else 1
        if processes > 1:
            raise ConfigurationError(
                message(
                    "Processes that train together cannot save by the clock, since their clocks do not agree.",
                    hint="use keras.callbacks.ModelCheckpoint(save_freq=...), which counts steps.",
                    processes=processes,
                )
            )
        self._saved_at = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() - self._saved_at < self.seconds:
            return
        path = Path(self.filepath.format(epoch=self._epoch))
        with written_whole(path, num_bytes(self.model), parents=True) as unfinished:
            self.model.save_weights(unfinished)
        self._saved_at = time.monotonic()
