"""What a step returns as its logs, made that of the global batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.internals import StatelessScope
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.shared.metric_results import MetricResults, Result, Told, noted_results
from tfrep_strategy.keras_integration.synchronous.assigned_values import of_all_replicas
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.batch_sums import (
    are_own_rows,
    compares_rows,
    is_count,
    of_all_rows,
    part_of_global,
)
from tfrep_strategy.keras_integration.synchronous.open_rows import TraceAgainError

_are_global: Setting[bool] = Setting(False)
"""Whether metrics tell the step that this thread traces what they are over all replicas."""


class ResultsAreUsedError(TraceAgainError):
    """A step computes something from results of metrics, which were not those of all replicas."""


class Logs(MetricResults, SynchronousBase):
    """What steps and metrics tell."""

    def metrics_result_or_logs(self, original: Any, model: Any, logs: Any) -> Any:
        """Sums the state of all metrics over the processes at once."""
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        with self.strategy.extended.summed_at_once(variables):
            return original(model, logs)

    def noted(self, noted: Told, metric: Any, value: Any) -> Any:
        """Gives a step that uses results those of the global batch."""
        step = current_step()
        if not _are_global.value or step is None or step.is_in_branch:
            return super().noted(noted, metric, value)
        asked = Result(metric)
        numbers = _global_results(self.strategy, [asked])[asked]
        noted.update((id(number), (number, None, index)) for index, number in enumerate(numbers))
        return tf.nest.pack_sequence_as(value, numbers)


_with_own_logs: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Of each model the phases ("train", "test") whose steps return more than the results of its metrics."""


def logs_of_all(model: Any, phase: str, logs: Any) -> Any:
    """Returns the logs of a step of all replicas; every process has to ask."""
    return logs if phase in _with_own_logs.get(model, ()) else model._get_metrics_result_or_logs(logs)


def with_global_logs(model: Any, phase: str, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step whose logs are more than the model's metrics, so that they are those of the global batch.

    Where the logs are exactly the metrics, nothing is done: they are read over all replicas when somebody asks. Else a
    result of a metric is computed from its state on all replicas, and another floating value, such as a bare loss, is the
    mean over the examples of the global batch, or the sum. A count of rows is that of the global batch, and what has something for
    each row has it for each row of the global batch.

    A step may compute with results, as in `tf.exp(self.loss.result())`. It is then traced again, and each result is that of
    all replicas at once. An eager step gets such results in any case, since nobody knows what it will do with them.
    """
    own_logs = _with_own_logs.setdefault(model, set())
    uses_results = False

    def step_with_global_logs(batch: Any) -> Any:
        nonlocal uses_results
        are_global = uses_results or tf.executing_eagerly()
        with noted_results(model.metrics) as told, _are_global.to(are_global):
            logs = step_function(batch)
        if not are_global and any(_is_used(number) for number, _, _ in told.values()):
            uses_results = True
            raise ResultsAreUsedError
        flat = tf.nest.flatten(logs)
        own_logs.discard(phase)
        # A bare loss may have the name of a metric: `return {"loss": loss}`.
        if isinstance(logs, dict) and set(logs) == set(model.get_metrics_result()) and all(id(value) in told for value in flat):
            return logs
        own_logs.add(phase)
        asked = [told[id(value)][1] for value in flat if id(value) in told]
        results = _global_results(strategy, dict.fromkeys(result for result in asked if result is not None))
        means = iter(_of_global_batch(strategy, [value for value in flat if id(value) not in told]))

        def whole(value: Any) -> tf.Tensor:
            if id(value) not in told:
                return next(means)
            _, result, index = told[id(value)]
            return value if result is None else results[result][index]

        return tf.nest.pack_sequence_as(logs, [whole(value) for value in flat])

    return step_with_global_logs


def with_logs_of_its_own(model: Any, phase: str, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step that takes the global batch, so that nobody reads its logs over all replicas."""
    own_logs = _with_own_logs.setdefault(model, set())

    def step(batch: Any) -> Any:
        own_logs.add(phase)
        return step_function(batch)

    return step


def _is_used(value: Any) -> bool:
    """Returns whether the step that is traced has computed something from a value."""
    step = current_step()
    return step is not None and step.has_computed(value) and bool(value.consumers())


def _of_global_batch(strategy: KerasStrategy, values: list[Any]) -> list[tf.Tensor]:
    step: Any = current_step()
    tensors = [tf.convert_to_tensor(value) for value in values]
    whole = {i: of_all_replicas(t) for i, t in enumerate(tensors) if t.shape.rank}
    known = {i: each for i, each in whole.items() if each is not None}
    rest = {i: t for i, t in enumerate(tensors) if i not in known}
    rows = {i for i, t in rest.items() if are_own_rows(step, t)}
    parts = {i: part_of_global(step, t) for i, t in rest.items() if t.dtype.is_floating and i not in rows}
    parts |= {i: t for i, t in rest.items() if t.dtype.is_integer and is_count(step, t) and not compares_rows(step, t)}
    known |= zip(parts, strategy.extended.sum_over_replicas(list(parts.values())), strict=True)
    left = {i: t for i, t in rest.items() if i not in parts}
    of_all = {i: of_all_rows(step, t) for i, t in left.items() if i in rows or compares_rows(step, t) or _is_told(t)}
    of_all |= {i: strategy.extended.gather_over_replicas(tensors[i]) for i in rows if of_all[i] is None}
    known |= {i: each for i, each in of_all.items() if each is not None}
    return [known.get(i, t) for i, t in enumerate(tensors)]


def _is_told(value: tf.Tensor) -> bool:
    """Whether a value is one truth or whole number, such as whether a loss is finite."""
    return value.shape.rank == 0 and (value.dtype.is_bool or value.dtype.is_integer)


def _global_results(strategy: KerasStrategy, results: Iterable[Result]) -> dict[Result, list[tf.Tensor]]:
    """Computes, on every replica, the results of metrics from the sums of their states."""
    ordered = list(results)
    summed = iter(strategy.extended.sum_over_replicas([value for result in ordered for value in result.state]))
    numbers = {}
    for result in ordered:
        state = [(variable, next(summed)) for variable in result.metric.variables]
        with StatelessScope(state_mapping=state):
            numbers[result] = tf.nest.flatten(result.metric.result())
    return numbers
