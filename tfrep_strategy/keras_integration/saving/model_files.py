"""Files of models that are complete or absent, whatever Keras writes; and `TimedCheckpoint`, for epochs that take hours."""

from __future__ import annotations

import io
import math
import os
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, check_seconds, message
from tfrep_strategy.keras_integration import whole_files
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.finding import driver_of_model
from tfrep_strategy.keras_integration.internals import H5IOStore, ask_to_proceed_with_overwrite, is_remote_path, save_state
from tfrep_strategy.keras_integration.whole_files import shown_as, written_whole


class ModelFiles(KerasDriver):
    """Writes the files of a model.

    Keras gets the path of a file that does not exist yet, so its question about overwriting is asked before.
    """

    def save_model(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Writes a model: a file of Keras's format or of the old one, or a folder."""
        if not is_local(filepath):
            return original(model, filepath, overwrite, zipped, **kwargs)
        if not _may_write(filepath, overwrite):
            return None
        old, in_folder = is_in_old_format(filepath, zipped), zipped is not None and not zipped
        size = num_bytes(model, kwargs.get("include_optimizer", True))
        with written_whole(filepath, size, parents=old or in_folder) as unfinished:
            if old:
                with whole_files.open_to_write(unfinished) as file:
                    original(model, file, True, zipped, **kwargs)
            else:
                original(model, unfinished, True, zipped, **kwargs)
        return None

    def save_weights(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, max_shard_size: Any = None, **kwargs: Any
    ) -> None:
        """Writes weights, to one file or to several."""
        if not is_local(filepath):
            return original(model, filepath, overwrite, max_shard_size, **kwargs)
        if not _may_write(filepath, overwrite):
            return None
        size = 0 if kwargs.get("objects_to_skip") is not None else num_bytes(model)
        largest = None if max_shard_size is None else int(max_shard_size * 2**30)
        with written_whole(filepath, size, largest) as unfinished:
            original(model, unfinished, True, max_shard_size, **kwargs)
        return None

    def export(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a model for serving."""
        if not is_local(filepath):
            return original(model, filepath, *args, **kwargs)
        size = num_bytes(model, optimizer=False)
        with written_whole(filepath, size, parents=True) as unfinished, shown_as(unfinished, filepath):
            original(model, unfinished, *args, **kwargs)
        return None


def weights_in_memory(model: Any) -> io.BytesIO:
    """Copies the weights of a model, and the variables of its optimizer.

    Args:
        model: A Keras model.

    Returns:
        The content that `save_weights` writes to a file.
    """
    content = io.BytesIO()
    store = H5IOStore(content, mode="w")
    save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    store.close()
    return content


def _may_write(filepath: str | os.PathLike[str], overwrite: bool) -> bool:
    """Asks the user, as Keras does, before a file is replaced."""
    return overwrite or not os.path.exists(filepath) or ask_to_proceed_with_overwrite(str(filepath))


def is_in_old_format(filepath: Any, zipped: bool | None = None) -> bool:
    """Returns whether Keras writes a whole model to this path in its old format."""
    return (zipped is None or bool(zipped)) and str(filepath).endswith((".h5", ".hdf5"))


def num_bytes(model: Any, optimizer: bool = True) -> int:
    """Returns the number of bytes of a model's variables, a lower bound of the size of its file.

    Args:
        model: A Keras model.
        optimizer: Whether the optimizer's variables are written as well.
    """
    variables = [*model.variables, *(getattr(getattr(model, "optimizer", None), "variables", []) if optimizer else [])]
    shapes = {id(v): (v.shape, tf.as_dtype(v.dtype).size) for v in variables if v.shape is not None}
    return sum(math.prod(shape) * size for shape, size in shapes.values())


def is_local(filepath: Any) -> bool:
    """Returns whether a path is local, not an open file or an address."""
    return isinstance(filepath, (str, os.PathLike)) and not is_remote_path(filepath)


_SUFFIX = ".weights.h5"


class TimedCheckpoint(keras.callbacks.Callback):
    """Saves the weights at the beginning of a step when enough time has passed since the last time.

    Under a parameter-server strategy the workers continue meanwhile, so the weights are saved as they are read, one after
    the other. A file is complete as soon as it has its name.

    Args:
        filepath: The path to save to. It ends in ".weights.h5", and may contain "{epoch}", which is replaced by the number of
            epochs begun.
        seconds: The time between two checkpoints.

    Raises:
        ConfigurationError: A setting cannot be used. Also raised when training begins under a strategy of several processes,
            because their clocks do not agree.

    Example:
        >>> checkpoint = tfrep.TimedCheckpoint("checkpoints/ckpt-{epoch}.weights.h5", seconds=600)
        >>> history = make_model().fit(x, y, callbacks=[checkpoint], verbose=0)
    """

    supports_remote_logs = True

    def __init__(self, filepath: str | os.PathLike[str], *, seconds: float = 600.0) -> None:
        super().__init__()
        if not str(filepath).endswith(_SUFFIX):
            raise ConfigurationError(
                message("TimedCheckpoint saves weights.", hint=f'end the name in "{_SUFFIX}".', filepath=str(filepath))
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
