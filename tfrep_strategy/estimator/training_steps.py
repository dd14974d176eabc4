"""What an estimator does between two steps of `fit`, and of `evaluate`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.estimator.rebuilt_models import SavedModel
from tfrep_strategy.estimator.run_config import RunConfig
from tfrep_strategy.estimator.session_hooks import HookCalls
from tfrep_strategy.estimator.summaries import Summaries, plain
from tfrep_strategy.keras_integration.shared.declared_callback import DeclaredCallback
from tfrep_strategy.strategies.of_process import process_communicator

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
