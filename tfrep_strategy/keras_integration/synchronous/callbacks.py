"""Callbacks that decide alike on every process, and write each file once.

Also callbacks that one process runs alone: a `ModelCheckpoint` under `if rank == 0:`, a tracker of experiments.
"""

from __future__ import annotations

import abc
import contextlib
import os
import random
import shutil
import tempfile
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfrep_strategy.core.scoped import before_changes
from tfrep_strategy.core.step import KerasStrategy
from tfrep_strategy.core.tf import random_state, set_random_state
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.internals import is_default, pythonify_logs
from tfrep_strategy.keras_integration.saving import backups
from tfrep_strategy.keras_integration.saving.training_state import (
    CHECKPOINTS,
    ORBAX,
    DeclaredCallback,
    beginning_whole,
    other_optimizers,
)
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.epoch_iterator import StepsOfReplicas
from tfrep_strategy.keras_integration.synchronous.functions import logs_of_all
from tfrep_strategy.keras_integration.synchronous.run_backups import backup_of_fit
from tfrep_strategy.keras_integration.synchronous.saving import failing_together, is_coordinated, written_once
from tfrep_strategy.keras_integration.verified_calls import callbacks_of_fit

_CHANGE_TRAINING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)

_TRACKERS = ("mlflow", "wandb")
"""Packages whose callbacks report to a server. One report is enough."""


class Given(NamedTuple):
    """The description of a callback that a process sends to the others.

    Attributes:
        kind: Module and name of its class.
        changes_training: Whether weights or the learning rate depend on it, or it works on all ranks only.
        tracks: Whether it reports to a tracker of experiments.
        settings: Its numbers, texts and functions, to distinguish it from others of its class.
    """

    kind: str
    changes_training: bool
    tracks: bool = False
    settings: str = ""

    @classmethod
    def of(cls, callback: Any) -> Given:
        """Describes a callback."""
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        restores = isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        restores = restores or (isinstance(callback, DeclaredCallback) and callback.needs_all_ranks)
        tracks = any(base.__module__.partition(".")[0] in _TRACKERS for base in type(callback).__mro__)
        settings = repr([(name, _described(value)) for name, value in sorted(vars(callback).items())])
        return cls(kind, restores or isinstance(callback, _CHANGE_TRAINING), tracks, settings)


def _described(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__module__, value.__qualname__, value.__code__.co_firstlineno
    return value if isinstance(value, (bool, int, float, str)) else type(value).__qualname__


def find_local(ranks: Sequence[Sequence[Given]]) -> dict[Given, list[int]]:
    """Finds callbacks that a process runs alone: not every process has them, or one report of theirs is enough.

    Args:
        ranks: The callbacks of each rank.

    Returns:
        Callbacks that some rank has fewer of than another, and trackers, each with the ranks that have the most of its kind.
        Callbacks of one kind need not have equal settings if all ranks have equally many: a path may contain the rank.

    Raises:
        ConfigurationError: Such a callback changes how the model trains, so the ranks' models would differ.
    """
    counts = [Counter(rank) for rank in ranks]
    of_all = {given for given in counts[0] if len({count[given] for count in counts}) == 1}
    kinds = [Counter(given.kind for given in rank if given not in of_all) for rank in ranks]
    found = {}
    for given in {given: None for rank in ranks for given in rank}:
        of_ranks = [count[given.kind] for count in kinds]
        is_alike = given in of_all or len(set(of_ranks)) == 1
        if is_alike and not (given.tracks and len(ranks) > 1):
            continue
        found[given] = [rank for rank, count in enumerate(of_ranks) if count == max(of_ranks)]
        if given.changes_training:
            raise ConfigurationError(
                message(
                    f"Only some ranks were given a {given.kind.rpartition('.')[2]}, which changes training or needs all ranks.",
                    hint="give it to all ranks. Its files are written only once all the same.",
                    ranks_with_it=found[given],
                )
            )
    return found


class LocalCallback(keras.callbacks.Callback):
    """Runs a callback of this process without the other ranks, which do not run it.

    Its random numbers from Python, NumPy and TensorFlow do not affect those of the ranks, so that all ranks keep drawing alike. It
    must not change the learning rate, weights, or the optimizer's state.

    Args:
        callback: The callback.
        strategy: The strategy whose merged state it reads on this process.
    """

    def __init__(self, callback: Any, strategy: KerasStrategy) -> None:
        super().__init__()
        self.callback, self._strategy = callback, strategy

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_default(getattr(self.callback, hook)):
            return  # The hook does nothing, and reading the learning rate would wait for the step.
        before = _learning_rate(self.model)
        changes: dict[int, tuple[Any, Any]] = {}
        with (
            self._strategy.extended.acting_alone(), is_coordinated.to(True), _own_random_numbers(), before_changes.to(changes)
        ):  # fmt: skip
            getattr(self.callback, hook)(*args, **kwargs)
        if repr(rate := _learning_rate(self.model)) != repr(before):  # With `repr`, NaN equals itself.
            raise ConfigurationError(
                message(
                    f"A {type(self.callback).__name__} that not all ranks were given has changed the learning rate.",
                    hint="give it to all ranks. Its files are written only once all the same.",
                    hook=hook,
                    before=before,
                    learning_rate=rate,
                )
            )
        if changed := _changed(self.model, changes):
            raise ConfigurationError(
                message(
                    f"A {type(self.callback).__name__} that not all ranks were given has changed the model or its optimizer.",
                    hint="give it to all ranks. Its files are written only once all the same.",
                    hook=hook,
                    variables=changed,
                )
            )

    return forward


def _changed(model: Any, before: Mapping[int, tuple[Any, Any]]) -> list[str]:
    """Returns the paths of variables of the training that have other values now."""
    optimizer = getattr(model, "optimizer", None)
    variables = {id(each._value): each.path for each in [*model.variables, *getattr(optimizer, "variables", ())]} if before else {}
    return [
        variables[each]
        for each, (variable, value) in before.items()
        if each in variables and not np.array_equal(variable.numpy(), value, equal_nan=True)
    ]


def _learning_rate(model: Any) -> float | None:
    """Returns the learning rate if a callback may set it; None for a schedule, which sets it by the number of steps."""
    optimizer = getattr(model, "optimizer", None)
    found = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return float(keras.ops.convert_to_numpy(found)) if isinstance(found, keras.Variable) else None


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    of_python, of_numpy, (seed, of_tensorflow) = random.getstate(), np.random.get_state(), random_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if seed is not None:
            set_random_state(seed, of_tensorflow)


for _hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(LocalCallback, _hook, _forwarding(_hook))


_DESTINATIONS: dict[type, Callable[[Any], str]] = {
    keras.callbacks.CSVLogger: lambda callback: os.path.abspath(callback.filename),
    keras.callbacks.ProgbarLogger: lambda callback: "terminal",
    keras.callbacks.RemoteMonitor: lambda callback: callback.root + callback.path,
    keras.callbacks.TensorBoard: lambda callback: os.path.abspath(callback.log_dir),
}
"""Callbacks that only write or show, and their destinations. Of those with the same destination one writes."""

_DECIDE_ALIKE = (*CHECKPOINTS, keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN)
"""Callbacks whose decisions about a batch are the same on all processes, because the logs are."""

_STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}
"""The attribute of a model with which callbacks end each phase."""


_PATHS: dict[type, str] = {keras.callbacks.CSVLogger: "filename", keras.callbacks.TensorBoard: "log_dir"}
"""The attributes of callbacks that hold their destinations."""

_redirected: Any = weakref.WeakKeyDictionary()
"""For callbacks that write into temporary folders: the attribute, its former value, and a function that removes the folder."""


def _destination(callback: Any, is_local: bool) -> str | None:
    if is_local and isinstance(callback, keras.callbacks.ModelCheckpoint):
        return os.path.abspath(callback.filepath)
    if is_local and isinstance(callback, ORBAX):
        return os.path.abspath(callback.directory)
    if is_local and Given.of(callback).tracks:
        return Given.of(callback).kind
    return next((where(callback) for kind, where in _DESTINATIONS.items() if isinstance(callback, kind)), None)


class Callbacks(backups.Backups, SynchronousBase):
    """Operations of callbacks.

    Attributes:
        is_fitting: Whether `fit` is running.
        is_called: Whether `evaluate` or `predict` is running. During `fit`, a callback has called it.
        given_to_fit: The arguments of `fit`.
        steps_of_fit: The iterator of `fit`.
    """

    is_fitting = False
    is_called = False
    given_to_fit: Mapping[str, Any] = {}
    steps_of_fit: StepsOfReplicas | None = None

    def init_callbacks(
        self, original: Any, callback_list: Any, callbacks: Any = None, add_history: bool = False,
        add_progbar: bool = False, model: Any = None, **params: Any,
    ) -> None:  # fmt: skip
        """Leaves out callbacks that another process runs, and adds those that keep the processes in step at both ends."""
        strategy = self.strategy
        callbacks = list(keras.tree.flatten(callbacks)) if callbacks else []
        agreement, callbacks = _agreed(strategy, callbacks)
        backup, verified = [], []
        if add_history and self.is_fitting:
            backup = backup_of_fit(strategy, model, self.given_to_fit, callbacks, self.steps_of_fit)
            verified = callbacks_of_fit(self.given_to_fit.get("x"))
        if self.has_several:  # A single replica needs no other process, and each callback is called twice in each step.
            callbacks = [_Before(strategy, agreement, self), *callbacks, _After(strategy, agreement)]
        original(
            callback_list, [*verified, *callbacks, *backup],
            add_history=add_history, add_progbar=add_progbar and strategy.extended.is_chief, model=model, **params,
        )  # fmt: skip

    def save_checkpoint(self, original: Any, callback: Any, epoch: int, batch: int | None, logs: Any) -> None:
        """Decides on every process whether to save, and saves on one process for each path."""
        best = callback.best
        try:
            with written_once(self.strategy, callback.filepath) as writes:
                if writes:
                    try:
                        original(callback, epoch, batch, logs)
                    except FileExistsError:  # Another process has made the folder since Keras checked.
                        callback.best = best
                        original(callback, epoch, batch, logs)
                else:  # This process must not touch the file system.
                    with _silent(callback):
                        callback._should_save_model(epoch, batch, logs, callback._get_file_path(epoch, batch, logs))
        except Exception:
            callback.best = best  # No file holds the best model.
            raise

    def save_orbax(self, original: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
        """Saves on one process for each path."""
        with written_once(self.strategy, callback.directory) as writes:
            if writes:
                original(callback, *args, **kwargs)

    def wait_for_orbax(self, original: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
        """Returns on every process when the files written in the background are complete."""
        with failing_together(self.strategy) if not is_coordinated.value else contextlib.nullcontext():
            original(callback, *args, **kwargs)

    def save_backup(self, original: Any, callback: Any) -> None:
        """Writes the backup on one process for each path."""
        with written_once(self.strategy, callback.backup_dir) as writes:
            if writes:
                super().save_backup(original, callback)

    def restore_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Restores the chief's backup on every process, since other processes may not see its disk."""
        strategy, model = self.strategy, callback.model
        optimizer = model.optimizer
        found = []
        with failing_together(strategy):
            if strategy.extended.is_chief:
                found = backups.find(callback)
        restores = strategy.extended.broadcast_object(bool(found))
        if restores and model.built and optimizer is not None and not optimizer.built:
            with strategy.scope():
                optimizer.build(model.trainable_variables)
        strategy.extended.synchronize_new_variables()
        batches = 0
        with failing_together(strategy), strategy.extended.acting_alone():
            if strategy.extended.is_chief:
                batches = backups.restore(original, callback, logs, found)
        model._initial_epoch, batches = strategy.extended.broadcast_object((model._initial_epoch, batches))
        if restores:
            strategy.extended.resumes_at = model._initial_epoch or 0, batches
            # Otherwise a second interruption would be recorded in epoch 0.
            callback._current_epoch = model._initial_epoch or 0
            optimizers = [*([] if optimizer is None else [optimizer]), *other_optimizers(model).values()]
            strategy.extended.broadcast_variables([*model.variables, *(v for each in optimizers for v in each.variables)])

    def remove_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Removes the backup where it was written."""
        with written_once(self.strategy, callback.backup_dir) as writes:
            if writes:
                super().remove_backup(original, callback, logs)


class _Agreement(NamedTuple):
    """A summary of the callbacks of all processes.

    Attributes:
        look_at_batches: The phases in which a callback looks at single batches.
        may_stop_alone: The phases in which a callback may stop for reasons that other processes do not have.
        some_are_local: Whether a process has a callback that it runs alone.
        own_is_local: Whether this process has one.
        elsewhere: The callbacks of this process that write into temporary folders.
    """

    look_at_batches: frozenset[str]
    may_stop_alone: frozenset[str]
    some_are_local: bool
    own_is_local: bool
    elsewhere: tuple[Any, ...]


def _agreed(strategy: KerasStrategy, callbacks: list[Any]) -> tuple[_Agreement, list[Any]]:
    """Compares the callbacks of all processes, and returns those that this process runs."""
    look_at_batches = frozenset[str]().union(*map(_phases_seen_by_batch, callbacks))
    of_their_own = [each for each in callbacks if not isinstance(each, _DECIDE_ALIKE) or _phases_of_users(each)]
    may_stop_alone = frozenset[str]().union(*map(_phases_seen_by_batch, of_their_own))
    for callback in callbacks:
        _write_to_own_path(callback)
    given = list(map(Given.of, callbacks))
    ranks = strategy.extended.all_gather_object((look_at_batches, may_stop_alone, given, any(map(_saves_alone, callbacks))))
    local = find_local([given for _, _, given, _ in ranks])
    look_at_batches, may_stop_alone = (frozenset().union(*(said[i] for said in ranks)) for i in (0, 1))
    are_local = [each in local for each in given]
    destinations = list(map(_destination, callbacks, are_local))
    firsts = strategy.extended.first_with(destinations)
    run = []
    for callback, is_local, destination, first in zip(callbacks, are_local, destinations, firsts, strict=True):
        if first or destination is None:
            run.append((callback, is_local or _saves_alone(callback)))
        elif not is_local and _writes_more(callback):
            run.append((_redirect(callback), False))
    in_step = [LocalCallback(callback, strategy) if is_local else callback for callback, is_local in run]
    some_are_local = bool(local) or any(saves_alone for *_, saves_alone in ranks)
    own_is_local, elsewhere = any(is_local for _, is_local in run), tuple(each for each, _ in run if each in _redirected)
    agreement = _Agreement(look_at_batches, may_stop_alone, some_are_local, own_is_local, elsewhere)
    return agreement, [*beginning_whole(callback for callback, _ in run), *in_step]


class _AllProcessCallback(keras.callbacks.Callback):
    """A callback at one end of the list, which acts on all processes together.

    Args:
        strategy: The strategy of the model.
        agreement: The summary of the callbacks of all processes.
    """

    def __init__(self, strategy: KerasStrategy, agreement: _Agreement) -> None:
        super().__init__()
        self._strategy, self._agreement = strategy, agreement
        # If no callback looks at batches, there is nothing to do at one, and Keras may draw its bar meanwhile.
        self.async_safe = not agreement.look_at_batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end_batch("train", logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end_batch("test", logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end_batch("predict", logs)

    @abc.abstractmethod
    def _end_batch(self, phase: str, logs: Any) -> None:
        """Acts at the end of each batch."""


class _Before(_AllProcessCallback):
    """Makes the logs and state that other callbacks see those of the whole batch, over all replicas.

    Args:
        strategy: The strategy of the model.
        agreement: The summary of the callbacks of all processes.
        calls: Tells whether Keras runs the list. A custom training loop passes final logs.
    """

    def __init__(self, strategy: KerasStrategy, agreement: _Agreement, calls: Callbacks) -> None:
        super().__init__(strategy, agreement)
        self._calls = calls

    def _end_batch(self, phase: str, logs: Any) -> None:
        if phase in self._agreement.look_at_batches:
            # Outputs are already those of all replicas.
            if logs and phase != "predict" and (self._calls.is_fitting or self._calls.is_called):
                # All callbacks get this one object.
                of_all = pythonify_logs(logs_of_all(self.model, phase, dict(logs)))
                logs.clear()
                logs.update(of_all)
            self._prepare_for_local()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._strategy.extended.merge_replica_state()
        self._prepare_for_local()

    def _prepare_for_local(self) -> None:
        """Makes state that is spread over the processes readable on each, if a process runs a callback alone."""
        if self._agreement.some_are_local:
            self._strategy.extended.synchronize_new_variables()
            self._strategy.extended.merge_replica_state()
            self._strategy.extended.collect_parts(reads=self._agreement.own_is_local)


class _After(_AllProcessCallback):
    """Ends a phase on all processes if one wants to, and training when all have finished."""

    def _end_batch(self, phase: str, logs: Any) -> None:
        if phase in self._agreement.may_stop_alone:
            self._stop_if(self._strategy.extended.any_process(self._wants_to_stop(phase)), phase)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_if(any(self._strategy.extended.all_gather_object(self._wants_to_stop("train"))), "train")

    def on_train_end(self, logs: Any = None) -> None:
        """Returns on every process when the files that callbacks write at the end are complete."""
        self._strategy.extended.all_gather_object(None)
        for callback in self._agreement.elsewhere:
            _write_to_own_path(callback)

    def _wants_to_stop(self, phase: str) -> bool:
        return bool(getattr(self.model, _STOPS[phase], False))  # In a custom training loop a model may lack the attribute.

    def _stop_if(self, some_want_to: bool, phase: str) -> None:
        if some_want_to:
            setattr(self.model, _STOPS[phase], True)


def _phases_seen_by_batch(callback: Any) -> frozenset[str]:
    """Returns the phases in which a callback looks at single batches."""
    if isinstance(callback, (keras.callbacks.ProgbarLogger, keras.callbacks.BackupAndRestore)):
        return _phases_of_users(callback)
    if isinstance(callback, DeclaredCallback) and not callback.looks_at_batches:
        return frozenset()
    if isinstance(callback, CHECKPOINTS):
        return _phases_of_users(callback).union(["train"] if callback.save_freq != "epoch" else [])
    if isinstance(callback, keras.callbacks.TensorBoard):
        return _phases_of_users(callback).union(["train"] if callback.update_freq != "epoch" else [])
    phases = [phase for phase in _STOPS if not is_default(getattr(callback, f"on_{phase}_batch_end"))]
    return frozenset(phases if is_default(callback.on_batch_end) else [*phases, "train"])


def _phases_of_users(callback: Any) -> frozenset[str]:
    """Returns the phases in which a user's subclass of a Keras callback has its own hook after a batch."""
    phases = [phase for phase in _STOPS if _is_users(callback, f"on_{phase}_batch_end")]
    return frozenset([*phases, "train"] if _is_users(callback, "on_batch_end") else phases)


def _is_users(callback: Any, hook: str) -> bool:
    return not getattr(type(callback), hook).__module__.startswith(("keras.", "tfrep_strategy."))


def _saves_alone(callback: Any) -> bool:
    """Returns whether a callback on one process saves the model by itself."""
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback.embeddings_freq) and not _writes_more(callback)


def _writes_more(callback: Any) -> bool:
    """Returns whether a callback is a user's subclass of one that writes. It may use the model, as all processes must."""
    hooks = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
    return isinstance(callback, tuple(_PATHS)) and any(_is_users(callback, hook) for hook in hooks)


def _redirect(callback: Any) -> Any:
    """Lets a callback write into a temporary folder, since another process writes to its path. `_write_to_own_path` undoes it."""
    name = next(name for kind, name in _PATHS.items() if isinstance(callback, kind))
    path, folder = getattr(callback, name), tempfile.mkdtemp(prefix="tfrep-callback-")
    _redirected[callback] = name, path, weakref.finalize(callback, shutil.rmtree, folder, ignore_errors=True)
    setattr(callback, name, os.path.join(folder, os.path.basename(path)))
    return callback


def _write_to_own_path(callback: Any) -> None:
    if callback in _redirected:
        name, path, remove = _redirected.pop(callback)
        setattr(callback, name, path)
        remove()


@contextlib.contextmanager
def _silent(callback: Any) -> Iterator[None]:
    verbose, callback.verbose = callback.verbose, 0
    try:
        yield
    finally:
        callback.verbose = verbose
