"""Backups that a run makes of each `fit`, so that it can be started again: `tfrep run --max-restarts`, `--backup-dir`.

All ranks decide alike. About once a second they tell each other whether one was asked to end, and rank 0 decides whether a backup
is due. Steps in between cost nothing. Rank 0 copies the values, and a thread writes the copies one after the other while training
continues. Training does not depend on the files.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfrep_strategy.cluster.events import of_run
from tfrep_strategy.cluster.notices import Progress, Step, answer_requests_to_end, end_as_asked, is_asked_to_end
from tfrep_strategy.core.limits import backup_dir, backup_seconds, progress_dir
from tfrep_strategy.core.step import KerasStrategy
from tfrep_strategy.core.tf import is_none
from tfrep_strategy.keras_integration.internals import tensorflow_trainer
from tfrep_strategy.keras_integration.saving.backups import exists, newest_metadata, prepared
from tfrep_strategy.keras_integration.saving.model_files import weights_in_memory
from tfrep_strategy.keras_integration.saving.training_state import (
    DeclaredCallback,
    assign_beside_files,
    assign_recurrent_states,
    build_others,
    cut_to,
    lengths_of,
    places_of,
    read_beside_weights,
    restore_states,
    states_of,
    values_beside_files,
    write_beside_weights,
)
from tfrep_strategy.keras_integration.synchronous.epoch_iterator import StepsOfReplicas
from tfrep_strategy.keras_integration.synchronous.fit_descriptions import description, differences, is_backup_of
from tfrep_strategy.keras_integration.synchronous.saving import failing_together, written_once


class BackgroundWrites:
    """Writes on a thread, one item at a time. Python waits for it before it ends.

    Failures are reported to the user, once for each kind until a write succeeds.
    """

    def __init__(self) -> None:
        self._last: futures.Future[bool] | None = None
        self._reported = set[tuple[type, int | None]]()

    @property
    def is_writing(self) -> bool:
        """Whether a write is running."""
        return self._last is not None and not self._last.done()

    def start(self, what: str, write: Callable[[], None]) -> None:
        """Starts a write when the previous one is over.

        Args:
            what: Its name, for the user.
            write: Writes from a copy that does not change. If it fails, existing files are unchanged.
        """
        self.wait()
        executor = futures.ThreadPoolExecutor(1, "tfrep-write")
        self._last = executor.submit(self._try, what, write)
        executor.shutdown(wait=False)  # The thread ends with the write.

    def wait(self) -> bool:
        """Waits for all writes, and returns whether the last one succeeded."""
        return self._last is None or self._last.result()

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Waits after the block, also if it raises an error."""
        try:
            yield
        finally:
            self.wait()

    def _try(self, what: str, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as error:
            kind = type(error), getattr(error, "errno", None)
            if kind not in self._reported:
                self._reported.add(kind)
                kept = "The backup before it is kept. Training goes on, and the next backup is tried."
                text = f"{what} was not written: {error}\n{kept}"
                print(f"tfrep: {text}", file=sys.stderr, flush=True)
            return False
        self._reported.clear()
        return True


_SHARE_OF_TIME = 0.02
_SECONDS_BETWEEN_LOOKS = 1.0
_BYTES_PER_SECOND, _LEAST_COST = 300e6, 0.1
"""For the estimated time that training waits for the first backup."""

writes = BackgroundWrites()
"""The writes of all `fit`s of this process."""


class Pace:
    """Decides when a backup is due: so that backups take a fiftieth of the time, or after the user's number of seconds.

    Args:
        model: The model.
    """

    last_saved = time.monotonic()
    """For all `fit`s together, since a program may call it many times."""

    def __init__(self, model: Any) -> None:
        size = sum(variable.value.dtype.size * variable.value.shape.num_elements() for variable in model.variables)
        self._cost = _LEAST_COST + 3 * size / _BYTES_PER_SECOND  # Weights, and two slots of an optimizer.
        self._looked = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether a backup is due. Unless the user has set the time, training never waits for the disk."""
        seconds = backup_seconds()
        if seconds is None:
            seconds = math.inf if writes.is_writing else self._cost / _SHARE_OF_TIME
        return time.monotonic() - Pace.last_saved >= seconds

    def steps_until_next(self, steps_done: int) -> int:
        """Returns the number of steps until the next look, given the number of steps since the last one."""
        if backup_seconds() == 0:
            return 1
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        # The first steps are slow because they are traced, so the number grows gradually.
        return min(max(1, round(_SECONDS_BETWEEN_LOOKS * steps_done / max(seconds, 1e-6))), 10 * steps_done + 1)

    def note_cost(self, seconds: float) -> None:
        """Records how long training has waited for a backup."""
        self._cost = seconds
        self._looked = Pace.last_saved = time.monotonic()


_NAME = "fit-"
"""Prefix of the name of each `fit`'s folder."""

_FIT, _IS_FINISHED, _OPTIMIZERS = "fit", "is_finished", "optimizers"
"""Keys of the metadata: the `fit` that a backup belongs to, whether it has finished, and the variables of other optimizers."""

_fits = itertools.count()
_places_taken = set[str]()
"""The folders of the `fit`s of this process."""


def backup_of_fit(
    strategy: KerasStrategy, model: Any, given: Mapping[str, Any], callbacks: Sequence[Any], steps: StepsOfReplicas | None
) -> list[RunBackup]:
    """Returns the callback that backs up a `fit` of a run, if the run is backed up and the program does not do so itself.

    Every process must call it, for each `fit`.

    Args:
        strategy: The strategy of the model.
        model: The model.
        given: The arguments of `fit`, by name.
        callbacks: The callbacks of the program.
        steps: The iterator of the `fit`.
    """
    folder, number = backup_dir(), next(_fits)
    has_own = any(
        isinstance(callback, keras.callbacks.BackupAndRestore)
        or (isinstance(callback, DeclaredCallback) and callback.saves_training)
        for callback in callbacks
    )
    if not folder or steps is None or any(strategy.extended.all_gather_object(has_own)):
        return []
    strategy.extended.synchronize_new_variables()
    strategy.extended.merge_replica_state()
    own: dict[str, Any] = {}
    place, text = "", ""
    with failing_together(strategy), strategy.extended.acting_alone():
        if strategy.extended.is_chief:
            own = description(number, model, given, steps.num_batches, callbacks)
            place, text = _place_of(own, folder)
    place, text = strategy.extended.broadcast_object((place, text))
    if text:
        _say(strategy, text)
    return [RunBackup(strategy, place, own, given, callbacks, steps)]


def _place_of(own: dict[str, Any], folder: str) -> tuple[str, str]:
    """Finds the backup of a `fit`. A backup is used for one `fit` of this process.

    Args:
        own: The description of the `fit`.
        folder: The folder of the backups of all `fit`s.

    Returns:
        The folder of the backup, existing or new, and a text for the user.
    """
    places = {number: os.path.join(folder, f"{_NAME}{number}") for number in _numbers(folder)}
    found = {place: newest_metadata(_Files(place)) for place in places.values() if place not in _places_taken}
    of_call = [place for place, content in found.items() if content.get(_FIT, own)["number"] == own["number"]]
    text = ""
    for place in [*of_call, *found]:
        content = found[place]
        if not content and place == places.get(own["number"]):
            break  # The backup was interrupted or damaged. `RunBackup` reports that.
        if _FIT in content and is_backup_of(own, content[_FIT], content[_IS_FINISHED]):
            break
    else:
        if of_call and _FIT in found[of_call[0]]:
            differ = " and ".join(differences(own, found[of_call[0]][_FIT]))
            text = f"fit {own['number']} starts from the beginning: its backup belongs to another fit ({differ} differ)."
        taken = {*places.values(), *_places_taken}
        free = (os.path.join(folder, f"{_NAME}{number}") for number in itertools.count(own["number"]))
        place = next(place for place in free if place not in taken)
    _places_taken.add(place)
    return place, text


def _numbers(folder: str) -> list[int]:
    """Returns the numbers of the backups in a folder. Some file systems list folders with a slash."""
    try:
        names = tf.io.gfile.listdir(folder)
    except tf.errors.NotFoundError:
        return []
    found = (re.fullmatch(rf"{_NAME}(\d+)/?", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _say(strategy: KerasStrategy, text: str) -> None:
    if strategy.extended.is_chief:
        print(f"tfrep: {text}", file=sys.stderr, flush=True)


class _Status(NamedTuple):
    """A rank's message to the others.

    Attributes:
        is_asked_to_end: Whether it was asked to end.
        saves: Whether a backup is due. Rank 0 decides.
        steps: Number of steps until the next look. Rank 0 decides.
    """

    is_asked_to_end: bool
    saves: bool
    steps: int


class _Place(NamedTuple):
    """The progress of a `fit`.

    Attributes:
        epoch: The number of the current epoch.
        batches: Number of completed batches of that epoch.
        epochs_read: Number of epochs of the data that were read.
        is_finished: Whether the `fit` has finished.
    """

    epoch: int
    batches: int
    epochs_read: int
    is_finished: bool = False

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batches}"


class _Files(keras.callbacks.BackupAndRestore):
    """Reads and writes weights, and the other state of this `fit` in the same file."""

    restored: dict[str, Any] | None = None
    """The state that was beside the restored weights."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, save_freq=1, delete_checkpoint=False)

    def _load_model(self) -> None:
        super()._load_model()
        self.restored = read_beside_weights(self._weights_path)

    def start_to_save(self, place: _Place, content: dict[str, Any], fit: dict[str, Any]) -> None:
        """Copies the content of a backup, and starts to write it.

        Args:
            place: The progress of the `fit`.
            content: The state beside the weights.
            fit: The description of the `fit`.
        """
        writes.wait()  # Only one copy exists at a time.
        weights = weights_in_memory(self.model)
        write_beside_weights(weights, content)
        self._current_epoch, self._last_batch_seen = place.epoch, place.batches - 1
        what = f"The backup of fit {fit['number']}, {place}"
        about = {_FIT: fit, _IS_FINISHED: place.is_finished, _OPTIMIZERS: places_of(self.model)}
        write = prepared(self, weights, about)

        def write_and_tell() -> None:
            write()
            of_run().tell("backup", fit=fit["number"], epoch=place.epoch, batch=place.batches)

        writes.start(what, write_and_tell)


class RunBackup(keras.callbacks.Callback):
    """Backs up a `fit`, and resumes it when the run is started again. It comes after the program's callbacks.

    Args:
        strategy: The strategy of the model.
        folder: The folder of this `fit`.
        fit: Its description, on rank 0.
        given: Its arguments, by name.
        callbacks: The program's callbacks; a backup has their states.
        steps: Its iterator.
    """

    async_safe = True  # It does not use the logs of batches.

    def __init__(
        self,
        strategy: KerasStrategy,
        folder: str,
        fit: dict[str, Any],
        given: Mapping[str, Any],
        callbacks: Sequence[Any],
        steps: StepsOfReplicas,
    ) -> None:
        super().__init__()
        self._strategy, self._given, self._callbacks, self._steps = strategy, given, callbacks, steps
        self._files = _Files(folder)
        self._fit, self._progress = fit, Progress(Path(progress_dir()))
        self._epoch = self._epochs_read = self._batches_begun = 0
        self._steps_done, self._steps_wanted = 0, 1
        self._restored: dict[str, Any] | None = None
        self._pace: Pace | None = None
        if strategy.extended.broadcast_object(strategy.extended.is_chief and exists(self._files)):
            for callback in callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True  # The file is continued.

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the backup, after the `on_train_begin` of the other callbacks."""
        model, extended = self.model, self._strategy.extended
        if not model.built:
            what = "the model is not built before fit, so this fit has no backup."
            _say(self._strategy, f"{what} Call the model on a batch first.")
            return
        self._pace = Pace(model)
        model._initial_epoch = None  # It may belong to an earlier `fit`.
        self._files.set_model(model)
        others = newest_metadata(self._files).get(_OPTIMIZERS, {}) if extended.is_chief else {}
        with self._strategy.scope():
            build_others(model, extended.broadcast_object(others))
        self._files.on_train_begin()
        (epochs, batches), extended.resumes_at = extended.resumes_at, (0, 0)
        self._restored = extended.broadcast_object(self._files.restored)
        if self._restored is not None:
            self._go_on(self._restored, epochs, batches)
        self._steps.before_step = self._before_step
        answer_requests_to_end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the state of callbacks and metrics in the middle of an epoch, which now begins a second time."""
        self._epoch, self._batches_begun = epoch, 0
        self._epochs_read += 1
        restored, self._restored = self._restored, None
        if restored is not None:
            self._restore_history(restored)
            if restored["batches"]:
                restore_states(self._callbacks, restored["callbacks"])
                assign_recurrent_states(self.model, restored["beside_files"])  # A callback may have reset them.
                self._assign_metrics(restored["metrics"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Checks whether a backup is due. Keras records this epoch later."""
        epochs = [*self.model.history.epoch, epoch]
        history = {name: list(values) for name, values in self.model.history.history.items()}
        for name, value in (logs or {}).items():
            history.setdefault(name, []).append(value)
        self._look(_Place(epoch + 1, 0, self._epochs_read, self.model.stop_training), {"epochs": epochs, "history": history})

    def on_train_end(self, logs: Any = None) -> None:
        """Backs up the end, so that a finished `fit` is not repeated."""
        self._steps.before_step = None
        if self._restored is not None:  # No epoch remained.
            self._restore_history(self._restored)
        else:
            self._look(_Place(self._epoch + 1, 0, self._epochs_read, True), self._history())
            self._wait()
        self.model._initial_epoch = None

    def _has_left_early(self) -> bool:
        """Returns whether a callback has ended training within the epoch."""
        batches = self._steps.num_batches
        return bool(self.model.stop_training and batches is not None and self._batches_begun < batches)

    def _before_step(self, batches_done: int) -> None:
        self._batches_begun = batches_done + self.model.steps_per_execution
        if self._strategy.extended.is_chief:
            self._progress.note(Step(self._fit["number"], self._epoch, batches_done))
        if self._steps_done >= self._steps_wanted:
            self._look(_Place(self._epoch, batches_done, self._epochs_read - 1), self._history())
        self._steps_done += 1

    def _look(self, place: _Place, history: dict[str, Any]) -> None:
        """Asks all ranks whether one was asked to end, and rank 0 whether a backup is due."""
        if self._pace is None:
            return
        own = _Status(is_asked_to_end(), self._pace.is_due(), self._pace.steps_until_next(self._steps_done))
        looks = self._strategy.extended.all_gather_object(own)
        self._steps_done, self._steps_wanted = 0, looks[0].steps
        ends = any(look.is_asked_to_end for look in looks)
        if ends or looks[0].saves:
            started = time.monotonic()
            self._save(place, history)
            self._pace.note_cost(time.monotonic() - started)
        if ends:
            is_written = self._wait()
            _say(self._strategy, f"asked to end. {f'A backup was made: {place}' if is_written else 'The backup was not written'}.")
            end_as_asked()

    def _save(self, place: _Place, history: dict[str, Any]) -> None:
        metrics = self.model.metrics_variables if place.batches else []
        content = history | {
            "is_finished": place.is_finished,
            "batches": place.batches,
            "epochs_read": place.epochs_read,
            "left_early": self._has_left_early(),
            "callbacks": states_of(self._callbacks),
            "csv_lengths": lengths_of(self._callbacks),
            "metrics": [keras.ops.convert_to_numpy(variable) for variable in metrics],
        }
        with written_once(self._strategy, self._files.backup_dir) as is_written_here:
            if is_written_here:
                content["beside_files"] = values_beside_files(self.model)
                self._files.start_to_save(place, content, self._fit)

    def _wait(self) -> bool:
        """Waits on all ranks for the last backup, and returns whether it was written."""
        return self._strategy.extended.all_gather_object(writes.wait())[0]

    def _history(self) -> dict[str, Any]:
        return {"epochs": self.model.history.epoch, "history": self.model.history.history}

    def _go_on(self, restored: dict[str, Any], epochs: int, batches: int) -> None:
        restore_states(self._callbacks, restored["callbacks"])
        self._epochs_read = restored["epochs_read"]
        every = self._given.get("validation_freq", 1)
        self._strategy.extended.validations_done = sum(self.model._should_eval(epoch, every) for epoch in restored["epochs"])
        # A backup at the end of the last epoch may be the last one that was made.
        if restored[_IS_FINISHED] or epochs >= self.params["epochs"]:
            self._steps.pass_over(self._epochs_read, restored.get("left_early", False))
            self._pass_over_validations()
            self.model._initial_epoch = self.params["epochs"]
            _say(self._strategy, "this fit was finished before. It is not repeated.")
        else:
            self._strategy.extended.resumes_at = self._epochs_read, batches
            cut_to(restored["csv_lengths"], self._callbacks)  # A later `fit` may have overwritten the file of a finished one.
            _say(self._strategy, f"fit resumes from its backup: epoch {epochs}, batch {batches}.")
        with self._strategy.scope():
            assign_beside_files(self.model, restored["beside_files"])

    def _pass_over_validations(self) -> None:
        """Advances the order of validation data if no validation remains, since another `fit` may read the same data."""
        given = self._given
        if given.get("validation_data") is not None and self._strategy.extended.validations_done:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(given["validation_data"])
            tensorflow_trainer.TFEpochIterator(  # As Keras makes it for validation. It skips validations that are done.
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=given.get("validation_batch_size") or given.get("batch_size"),
                steps_per_epoch=given.get("validation_steps"),
                steps_per_execution=self.model.steps_per_execution,
                shuffle=False,
                distribute_strategy=self._strategy,
            )

    def _restore_history(self, restored: dict[str, Any]) -> None:
        self.model.history.epoch, self.model.history.history = restored["epochs"], restored["history"]

    def _assign_metrics(self, values: Sequence[Any]) -> None:
        if len(values) != len(self.model.metrics_variables):
            self._build_metrics()
        variables = self.model.metrics_variables
        if len(values) != len(variables):
            _say(self._strategy, "metrics of this epoch start from zero, because the step makes them when it runs.")
        elif self._strategy.extended.is_chief:
            with self._strategy.extended.acting_alone():
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)

    def _build_metrics(self) -> None:
        """Makes metrics that a user's step makes when it is traced, as far as possible before that."""
        part = tf.nest.map_structure(lambda each: None if is_none(each) else each, self._steps.part_spec)
        with contextlib.suppress(Exception), self._strategy.scope():
            self.model._symbolic_build(data_batch=part)
        self._strategy.extended.synchronize_new_variables()
