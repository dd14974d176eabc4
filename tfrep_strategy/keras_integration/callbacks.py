"""Callbacks that decide alike on every process, and write each file once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfrep_strategy.keras_integration.lone_callbacks import Given, LoneCallback, find_lone
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import KerasStrategy
from tfrep_strategy.keras_integration.saving import failing_together, is_coordinated, written_once
from tfrep_strategy.keras_integration.trainer import strategy_of

_file_utils = keras_internal("utils.file_utils")
_is_default = keras_internal("utils.python_utils", "is_default")

_DESTINATIONS: dict[type, Callable[[Any], str]] = {
    keras.callbacks.CSVLogger: lambda callback: os.path.abspath(callback.filename),
    keras.callbacks.ProgbarLogger: lambda callback: "terminal",
    keras.callbacks.RemoteMonitor: lambda callback: callback.root + callback.path,
    keras.callbacks.TensorBoard: lambda callback: os.path.abspath(callback.log_dir),
}
"""Callbacks that do nothing but write or show, and where to; of those with the same destination one writes."""

_CHECKPOINTS = (keras.callbacks.ModelCheckpoint, keras.callbacks.OrbaxCheckpoint)

_DECIDE_ALIKE = (*_CHECKPOINTS, keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN)
"""Callbacks whose decisions about a batch are the same everywhere, because its logs are."""

_STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}
"""The attribute of a model by which callbacks end each phase."""


def _destination(callback: Any, is_lone: bool) -> str | None:
    if is_lone and isinstance(callback, keras.callbacks.ModelCheckpoint):
        return os.path.abspath(callback.filepath)
    if is_lone and isinstance(callback, keras.callbacks.OrbaxCheckpoint):
        return os.path.abspath(callback.directory)
    return next((where(callback) for kind, where in _DESTINATIONS.items() if isinstance(callback, kind)), None)


@replaces(keras.callbacks.CallbackList, "__init__")
def init_callback_list(
    original: Any, self: Any, callbacks: Any = None, add_history: bool = False, add_progbar: bool = False,
    model: Any = None, **params: Any,
) -> None:  # fmt: skip
    """Leaves out what another process writes, and notes whether somebody looks at single batches."""
    strategy = None if model is None else strategy_of(model)
    self._looks_at_batches, self._may_stop_alone, self._some_are_lone = frozenset(), frozenset(), False
    if strategy is not None:
        callbacks = _of_this_process(self, strategy, list(keras.tree.flatten(callbacks)) if callbacks else [])
        add_progbar = add_progbar and strategy.is_chief
    original(self, callbacks, add_history=add_history, add_progbar=add_progbar, model=model, **params)


def _of_this_process(self: Any, strategy: KerasStrategy, callbacks: list[Any]) -> list[Any]:
    """Compares the callbacks of all processes, and returns those that this one runs."""
    look_at_batches = frozenset[str]().union(*map(_phases_seen_by_batch, callbacks))
    of_their_own = [callback for callback in callbacks if not isinstance(callback, _DECIDE_ALIKE)]
    may_stop_alone = frozenset[str]().union(*map(_phases_seen_by_batch, of_their_own))
    ranks = strategy.all_gather_object((look_at_batches, may_stop_alone, list(map(Given.of, callbacks))))
    self._looks_at_batches, self._may_stop_alone = (frozenset().union(*(said[i] for said in ranks)) for i in (0, 1))
    kinds = find_lone([given for _, _, given in ranks])
    self._some_are_lone = bool(kinds)
    are_lone = [Given.of(callback).kind in kinds for callback in callbacks]
    destinations = list(map(_destination, callbacks, are_lone))
    firsts = strategy.first_with(destinations)
    return [
        LoneCallback(callback, strategy) if is_lone else callback
        for callback, is_lone, destination, first in zip(callbacks, are_lone, destinations, firsts, strict=True)
        if first or destination is None
    ]


def _phases_seen_by_batch(callback: Any) -> frozenset[str]:
    """Returns in which phases a callback looks at single batches."""
    if isinstance(callback, (keras.callbacks.ProgbarLogger, keras.callbacks.BackupAndRestore)):
        return frozenset()
    if isinstance(callback, _CHECKPOINTS):
        return frozenset(["train"] if callback.save_freq != "epoch" else [])
    if isinstance(callback, keras.callbacks.TensorBoard):
        return frozenset(["train"] if callback.update_freq != "epoch" else [])
    phases = [phase for phase in _STOPS if not _is_default(getattr(callback, f"on_{phase}_batch_end"))]
    return frozenset(phases if _is_default(callback.on_batch_end) else [*phases, "train"])


def _agrees_on_batches(phase: str) -> None:
    @replaces(keras.callbacks.CallbackList, f"on_{phase}_batch_end")
    def on_batch_end(original: Any, self: Any, batch: int, logs: Any = None) -> None:
        """Shows callbacks the global logs of a batch; one process that wants to stop stops all."""
        # A list that was made before `__init__` was replaced has no such attribute, and no strategy of ours.
        if phase not in getattr(self, "_looks_at_batches", ()):
            return original(self, batch, logs)
        strategy: Any = strategy_of(self.model)
        if logs is not None and phase != "predict":  # Outputs are those of all replicas already.
            logs = self.model._get_metrics_result_or_logs(logs)
        _prepare_for_lone(self, strategy)
        original(self, batch, logs)
        if phase in self._may_stop_alone:
            _stop_together(strategy, self.model, _STOPS[phase])
        return None


for _phase in _STOPS:
    _agrees_on_batches(_phase)


def _stop_together(strategy: KerasStrategy, model: Any, attribute: str) -> None:
    """Ends a phase on all processes if one wants to; in a loop of one's own a model may not know of stopping."""
    if any(strategy.all_gather_object(getattr(model, attribute, False))):
        setattr(model, attribute, True)


def _prepare_for_lone(callback_list: Any, strategy: KerasStrategy) -> None:
    """Makes state that is spread over the processes readable on each of them alone, where one has a callback for itself."""
    if callback_list._some_are_lone:
        strategy.synchronize_new_variables()
        strategy.merge_replica_state()
        strategy.collect_sums()


@replaces(keras.callbacks.CallbackList, "on_epoch_end")
def on_epoch_end(original: Any, self: Any, epoch: int, logs: Any = None) -> None:
    """Merges moving statistics before callbacks read or save the model; one process that wants to stop stops all."""
    strategy = None if self.model is None else strategy_of(self.model)
    if strategy is None:
        return original(self, epoch, logs)
    strategy.merge_replica_state()
    _prepare_for_lone(self, strategy)
    original(self, epoch, logs)
    _stop_together(strategy, self.model, _STOPS["train"])
    return None


@contextlib.contextmanager
def _only_deciding(callback: Any) -> Iterator[None]:
    verbose, callback.verbose, callback.only_decides = callback.verbose, 0, True
    try:
        yield
    finally:
        callback.verbose, callback.only_decides = verbose, False


@replaces(keras.callbacks.ModelCheckpoint, "_save_model")
def save_checkpoint(original: Any, self: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """Decides on every process whether to save, and saves where `save` would."""
    strategy = strategy_of(self.model)
    if strategy is None or is_coordinated():
        return original(self, epoch, batch, logs)
    with written_once(strategy, self.filepath) as writes, contextlib.nullcontext() if writes else _only_deciding(self):
        original(self, epoch, batch, logs)
    return None


@replaces(keras.callbacks.ModelCheckpoint, "_should_save_model")
def should_save(original: Any, self: Any, *args: Any) -> bool:
    """Answers no where another process saves: nothing is looked for or made in the file system then."""
    return original(self, *args) and not getattr(self, "only_decides", False)


@replaces(keras.callbacks.OrbaxCheckpoint, "_save_checkpoint")
def save_orbax(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Saves on one process: Orbax knows JAX's processes and not these, so that each would write every file."""
    strategy = strategy_of(self.model)
    if strategy is None or is_coordinated():
        return original(self, *args, **kwargs)
    with written_once(strategy, self.directory) as writes:
        if writes:
            original(self, *args, **kwargs)
    return None


def _waits_for_writer(name: str) -> None:
    @replaces(keras.callbacks.OrbaxCheckpoint, name)
    def wait(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        """Returns everywhere when what is written in the background is there."""
        strategy = None if self.model is None else strategy_of(self.model)
        if strategy is None or is_coordinated():
            return original(self, *args, **kwargs)
        with failing_together(strategy):
            original(self, *args, **kwargs)
        return None


for _name in ("wait_until_finished", "on_train_end"):
    _waits_for_writer(_name)


@replaces(keras.callbacks.BackupAndRestore, "_save_model")
def save_backup(original: Any, self: Any) -> None:
    """Backs up where `save` would."""
    strategy = strategy_of(self.model)
    if strategy is None:
        return original(self)
    with written_once(strategy, self.backup_dir) as writes:
        if writes:
            original(self)
    return None


@replaces(keras.callbacks.BackupAndRestore, "on_train_begin")
def restore_backup(original: Any, self: Any, logs: Any = None) -> None:
    """Restores what the chief finds, everywhere: the other processes may not see its disk."""
    model = self.model
    strategy = strategy_of(model)
    if strategy is None:
        return original(self, logs)
    optimizer = model.optimizer
    exists = lambda: _file_utils.exists(self._weights_path) or _file_utils.exists(self._prev_weights_path)  # noqa: E731
    restores = strategy.broadcast_object(strategy.is_chief and exists())
    if restores and model.built and optimizer is not None and not optimizer.built:
        with strategy.scope():
            optimizer.build(model.trainable_variables)
    strategy.synchronize_new_variables()
    batches = 0
    with failing_together(strategy), strategy.acting_alone():
        if strategy.is_chief:
            original(self, logs)
            batches = _batches_done(self) if restores else 0
    model._initial_epoch, batches = strategy.broadcast_object((model._initial_epoch, batches))
    if restores:
        strategy.resumes_at = model._initial_epoch or 0, batches
        # Else a second interruption would be noted as one of epoch 0.
        self._current_epoch = model._initial_epoch or 0
        strategy.broadcast_variables(model.variables + (optimizer.variables if optimizer is not None else []))
    return None


def _batches_done(callback: Any) -> int:
    """Returns how many batches of the interrupted epoch the backup has seen; Keras itself starts that epoch again."""
    if callback.save_freq == "epoch" or not _file_utils.exists(callback._training_metadata_path):
        return 0
    with _file_utils.File(callback._training_metadata_path, "r") as file:
        return json.loads(file.read())["batch"] + 1


@replaces(keras.callbacks.BackupAndRestore, "on_train_end")
def remove_backup(original: Any, self: Any, logs: Any = None) -> None:
    """Removes the backup where it was written."""
    strategy = strategy_of(self.model)
    if strategy is None:
        return original(self, logs)
    strategy.resumes_at = 0, 0  # Where there was no epoch left to do.
    with written_once(strategy, self.backup_dir) as writes:
        if writes:
            original(self, logs)
    return None
