"""Callbacks that decide alike on every process, and write on the chief alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import keras

from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.saving import already_coordinated
from tfrep_strategy.keras_integration.trainer import strategy_of

_file_utils = keras_internal("utils.file_utils")
_is_default = keras_internal("utils.python_utils", "is_default")

WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that do nothing but write or show; only the chief keeps them."""


@replaces(keras.callbacks.CallbackList, "__init__")
def init_callback_list(
    original: Any, self: Any, callbacks: Any = None, add_history: bool = False, add_progbar: bool = False,
    model: Any = None, **params: Any,
) -> None:  # fmt: skip
    """Leaves out what only the chief does, and notes whether somebody looks at the logs of single batches."""
    strategy = None if model is None else strategy_of(model)
    callbacks = list(keras.tree.flatten(callbacks)) if callbacks else []
    self._shares_batch_logs = strategy is not None and any(map(_uses_batch_logs, callbacks))
    if strategy is not None and not strategy.is_chief:
        callbacks = [callback for callback in callbacks if not isinstance(callback, WRITERS)]
        add_progbar = False
    original(self, callbacks, add_history=add_history, add_progbar=add_progbar, model=model, **params)


def _uses_batch_logs(callback: Any) -> bool:
    if isinstance(callback, (keras.callbacks.ProgbarLogger, keras.callbacks.BackupAndRestore)):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_freq != "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq != "epoch"
    return not (_is_default(callback.on_batch_end) and _is_default(callback.on_train_batch_end))


@replaces(keras.callbacks.CallbackList, "on_train_batch_end")
def on_train_batch_end(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    """Shows callbacks the global logs of a batch, so that what they decide is the same everywhere."""
    if self._shares_batch_logs and logs is not None:
        logs = self.model._get_metrics_result_or_logs(logs)
    original(self, batch, logs)


@replaces(keras.callbacks.CallbackList, "on_epoch_end")
def on_epoch_end(original: Any, self: Any, epoch: int, logs: Any = None) -> None:
    """Merges moving statistics before callbacks read or save the model."""
    strategy = None if self.model is None else strategy_of(self.model)
    if strategy is not None:
        strategy.merge_replica_state()
    original(self, epoch, logs)


class _Unsaved:
    """A model that is not saved: stands in for the real one where another process writes the file."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""


@contextlib.contextmanager
def _silently(callback: Any) -> Iterator[None]:
    model, verbose = callback._model, getattr(callback, "verbose", 0)
    callback._model, callback.verbose = _Unsaved(model), 0
    try:
        yield
    finally:
        callback._model, callback.verbose = model, verbose


@replaces(keras.callbacks.ModelCheckpoint, "_save_model")
def save_checkpoint(original: Any, self: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """Decides on every process whether to save, and saves on the chief."""
    strategy = strategy_of(self.model)
    if strategy is None:
        return original(self, epoch, batch, logs)
    strategy.merge_replica_state()
    with already_coordinated(), contextlib.nullcontext() if strategy.is_chief else _silently(self):
        original(self, epoch, batch, logs)
    return strategy.barrier()


@replaces(keras.callbacks.BackupAndRestore, "_save_model")
def save_backup(original: Any, self: Any) -> None:
    """Backs up on the chief."""
    strategy = strategy_of(self.model)
    if strategy is None:
        return original(self)
    strategy.merge_replica_state()
    if strategy.is_chief:
        with already_coordinated():
            original(self)
    return strategy.barrier()


@replaces(keras.callbacks.BackupAndRestore, "on_train_begin")
def restore_backup(original: Any, self: Any, logs: Any = None) -> None:
    """Restores what the chief finds, everywhere: the other processes may not see its disk."""
    model = self.model
    strategy = strategy_of(model)
    if strategy is None:
        return original(self, logs)
    restores, batches = False, 0
    if strategy.is_chief:
        restores = _file_utils.exists(self._weights_path) or _file_utils.exists(self._prev_weights_path)
        original(self, logs)
        batches = _batches_done(self) if restores else 0
    found = strategy.broadcast_object((restores, model._initial_epoch, batches))
    restores, model._initial_epoch, strategy.batches_to_skip = found
    if restores:
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            with strategy.scope():
                optimizer.build(model.trainable_variables)
        strategy.synchronize_new_variables()
        strategy.broadcast_variables(model.variables + (optimizer.variables if optimizer is not None else []))
    return None


def _batches_done(callback: Any) -> int:
    """Returns how many batches of the interrupted epoch the backup has seen; Keras itself starts that epoch again."""
    if callback.save_freq == "epoch" or not _file_utils.exists(callback._training_metadata_path):
        return 0
    with _file_utils.File(callback._training_metadata_path, "r") as file:
        batch = json.loads(file.read())["batch"]
    return batch + 1 if batch else 0


@replaces(keras.callbacks.BackupAndRestore, "on_train_end")
def remove_backup(original: Any, self: Any, logs: Any = None) -> None:
    """Removes the backup on the chief."""
    strategy = strategy_of(self.model)
    if strategy is None or strategy.is_chief:
        original(self, logs)
    if strategy is not None:
        strategy.barrier()
