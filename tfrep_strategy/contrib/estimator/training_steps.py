"""The work of an estimator between two steps of `fit`, and of `evaluate`.

Summaries for TensorBoard, which the chief writes.

A model of the user, built again where it is to train: weights and settings as they were, variables of the strategy in scope.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.contrib.estimator.run_config import RunConfig
from tfrep_strategy.contrib.estimator.session_hooks import HookCalls
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.copied_models import cloned, compile_as, copy_state, custom_objects_of
from tfrep_strategy.keras_integration.saving.training_state import DeclaredCallback
from tfrep_strategy.strategies.groups import is_chief_process, process_communicator


class Summaries:
    """Writes numbers into a folder, on the chief, if the package `tensorboard` is there.

    Args:
        writer: TensorFlow's writer; None: nothing is written.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes numbers of a global step, by name; those of an array by its name and their places."""
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    for place, number in np.ndenumerate(value):
                        tf.summary.scalar("_".join([name, *map(str, place)]), number, step=step)


def plain(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns results of metrics as numbers, and as arrays where they have several."""
    arrays = {name: np.asarray(value) for name, value in results.items()}
    return {name: array if array.ndim else float(array) for name, array in arrays.items()}


@contextmanager
def summaries_in(folder: str) -> Iterator[Summaries]:
    """Yields the summaries of a folder, and closes its file afterwards."""
    if not is_chief_process() or importlib.util.find_spec("tensorboard") is None:
        yield Summaries(None)
        return
    writer = tf.summary.create_file_writer(folder)
    try:
        yield Summaries(writer)
    finally:
        writer.close()


def check_model(model: Any) -> None:
    """Refuses what no estimator can be made of.

    Raises:
        ConfigurationError: It is no Keras model, not compiled, or not built.
    """
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            message(
                "An estimator needs a Keras model.",
                hint="a model_fn becomes a function that makes one; see docs/migration/model_fn.md.",
                keras_model=model,
            )
        )
    if not model.compiled:
        raise ConfigurationError(message("The model is not compiled.", hint="call model.compile first.", keras_model=model.name))
    if not model.built:
        hint = "let it begin with keras.Input(shape), or call it on a batch first."
        raise ConfigurationError(message("The model has no weights yet.", hint=hint, keras_model=model.name))


def rebuilt(model: Any, strategy: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Builds a model again, in the scope of a strategy.

    Args:
        model: A model that is compiled and built. It stays as it is.
        strategy: The strategy; None for one device.
        custom_objects: What Keras cannot find by name, beside what `compile` was given.

    Returns:
        A model with the same weights, and an optimizer that has done no step.

    Raises:
        ConfigurationError: The class of the model cannot be built from its config.
    """
    with scope_of(strategy), keras.saving.custom_object_scope({**custom_objects_of(model), **(custom_objects or {})}):
        try:
            copy = cloned(model)
            if not copy.built:
                copy.build(model.get_build_config()["input_shape"])
            compile_as(model, copy)
        except (NotImplementedError, TypeError, ValueError) as error:
            hint = "give its classes get_config, and its functions names; or write it as keras.Model(inputs, outputs)."
            raise ConfigurationError(
                message(f"The model cannot be built again: {error}", hint=hint, keras_model=model.name)
            ) from error
        copy_state(model, copy)
    if not copy.compiled:
        hint = "override get_compile_config and compile_from_config."
        raise ConfigurationError(message("The model has its own `compile`.", hint=hint, keras_model=model.name))
    return copy


def scope_of(strategy: Any) -> Any:
    """Returns the scope of a strategy; None has one that does nothing."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


class SavedModel:
    """A model built again, with what a checkpoint holds: the model, its optimizer, and the global step.

    Args:
        model: The model of the user.
        strategy: The strategy; None for one device.
        custom_objects: What Keras cannot find by name.

    Attributes:
        model: The model.
        checkpoint: Saves and restores all of it.
    """

    def __init__(self, model: Any, strategy: Any, custom_objects: Mapping[str, Any] | None) -> None:
        self.model = rebuilt(model, strategy, custom_objects)
        with scope_of(strategy):
            self._step = tf.Variable(0, trainable=False, dtype=tf.int64, name="global_step")
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer, global_step=self._step)

    @property
    def global_step(self) -> int:
        """How many steps this model was trained."""
        return int(self._step)

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._step.assign(step)

    def restore(self, path: str | None) -> int:
        """Restores a checkpoint.

        Args:
            path: Its path; None: there is none, and the model stays as it was built.

        Returns:
            The global step.

        Raises:
            ConfigurationError: It is the checkpoint of another model.
        """
        if path is not None:
            try:
                self.checkpoint.restore(path).assert_existing_objects_matched()
            except (AssertionError, ValueError) as error:
                hint = "use another model_dir, or remove the old checkpoints."
                raise ConfigurationError(
                    message("The checkpoint is of another model.", hint=hint, checkpoint=path, keras_model=self.model.name)
                ) from error
        return self.global_step


_LOOKS = 20
"""How often the clock is looked at between two checkpoints."""


class CheckpointClock:
    """Decides when a checkpoint is due, on all ranks alike.

    Args:
        config: The settings.
        step: The global step at which the training starts.
    """

    def __init__(self, config: RunConfig, step: int) -> None:
        self._steps, self._seconds = config.save_checkpoints_steps, config.seconds_between_checkpoints
        self._saved = self._looked = time.monotonic()
        self._last_look = step
        self._next_look = step + 1

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step. Every process must call it, after each step."""
        if self._seconds is None:
            return step % (self._steps or 1) == 0
        if step < self._next_look:
            return False
        now = time.monotonic()
        steps, seconds = step - self._last_look, max(now - self._looked, 1e-6)
        # The first steps are slow, since they are traced; so the number grows by degrees.
        wait = max(1, min(int(self._seconds / _LOOKS * steps / seconds), 10 * steps))
        due, wait = process_communicator().broadcast_object((now - self._saved >= self._seconds, wait))
        self._looked, self._last_look, self._next_look = now, step, step + wait
        if due:
            self._saved = now
        return due


class TrainingSteps(DeclaredCallback):
    """Calls hooks, writes checkpoints and summaries during a `fit`.

    Args:
        config: The settings.
        saved: The model.
        calls: The hooks.
        summaries: Where to write loss, metrics and speed.
        save: Writes a checkpoint of a global step.

    Attributes:
        done: The global step.
    """

    saves_training = True

    def __init__(
        self, config: RunConfig, saved: SavedModel, calls: HookCalls, summaries: Summaries, save: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._config, self._calls, self._summaries, self._save = config, calls, summaries, save
        self._start = self._passed = self.done = saved.global_step
        self._counting = threading.Lock()
        self._clock = CheckpointClock(config, self._start)
        self._rate_at = self._start, time.monotonic()
        self.looks_at_batches = calls.some_have_hooks
        self.async_safe = not self.looks_at_batches

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.go_past(self._start + batch)
        if self.looks_at_batches or self._is_summarized(self._start + batch + 1):
            self.model.reset_metrics()  # Loss and metrics are those of the step.
        self._calls.before_run()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._counting:  # Threads may come in any order if no hook looks at batches.
            self.done = max(self.done, self._start + batch + 1)
        if self.looks_at_batches:
            self._calls.session.global_step = self.done
            self._calls.after_run(logs or {})
            if self._calls.session.stop_requested:
                self.model.stop_training = True

    def go_past(self, step: int) -> None:
        """Does what is due after a step. Every process must call it."""
        if step == self._passed:
            return
        self._passed = step
        if self._is_summarized(step):
            self._summaries.write(step, plain(self.model.get_metrics_result()))
        if self._config.log_step_count_steps and step % self._config.log_step_count_steps == 0:
            (step_before, before), self._rate_at = self._rate_at, (step, time.monotonic())
            rate = (step - step_before) / (self._rate_at[1] - before)
            self._summaries.write(step, {"global_step/sec": rate})
            tf.get_logger().info("step = %d, global_step/sec: %g", step, rate)
        if self._clock.is_due(step):
            self._save(step)

    def _is_summarized(self, step: int) -> bool:
        every = self._config.save_summary_steps
        return every is not None and (step == self._start + 1 or step % every == 0)


class EvaluationSteps(DeclaredCallback):
    """Calls hooks during an `evaluate`.

    Args:
        calls: The hooks.
    """

    def __init__(self, calls: HookCalls) -> None:
        super().__init__()
        self._calls = calls
        self.looks_at_batches = calls.some_have_hooks

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._calls.before_run()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._calls.after_run(logs or {})
        if self._calls.session.stop_requested:
            self.model.stop_evaluating = True
