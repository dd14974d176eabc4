"""What a step returns as its logs, made that of the global batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.patching import keras_internal
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_step
from tfrep_strategy.keras_integration.shared.metric_results import MetricResults, Result, noted_results
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.batch_sums import is_count, part_of_global

_StatelessScope = keras_internal("backend.common.stateless_scope", "StatelessScope")


class Logs(MetricResults, SynchronousBase):
    """What steps and metrics tell."""

    def metrics_result_or_logs(self, original: Any, model: Any, logs: Any) -> Any:
        """Sums the state of all metrics over the processes at once."""
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        with self.strategy.extended.summed_at_once(variables):
            return original(model, logs)


_with_own_logs: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Of each model the phases ("train", "test") whose steps return more than the results of its metrics."""


def logs_of_all(model: Any, phase: str, logs: Any) -> Any:
    """Returns the logs of a step of all replicas; every process has to ask."""
    return logs if phase in _with_own_logs.get(model, ()) else model._get_metrics_result_or_logs(logs)


def with_global_logs(model: Any, phase: str, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step whose logs are more than the model's metrics, so that they are those of the global batch.

    Where the logs are exactly the metrics, nothing is done: they are read over all replicas when somebody asks. Else a
    result of a metric is computed from its state on all replicas, and another floating value, such as a bare loss, is the
    mean over the examples of the global batch, or the sum. A count of rows is that of the global batch.
    """
    metrics = model.metrics
    own_logs = _with_own_logs.setdefault(model, set())

    def step_with_global_logs(batch: Any) -> Any:
        with noted_results(metrics) as told:
            logs = step_function(batch)
        flat = tf.nest.flatten(logs)
        own_logs.discard(phase)
        # A bare loss may have the name of a metric: `return {"loss": loss}`.
        if isinstance(logs, dict) and set(logs) == set(model.get_metrics_result()) and all(id(value) in told for value in flat):
            return logs
        own_logs.add(phase)
        results = _global_results(strategy, dict.fromkeys(told[id(value)][1] for value in flat if id(value) in told))
        means = iter(_global_means(strategy, [value for value in flat if id(value) not in told]))

        def whole(value: Any) -> tf.Tensor:
            if id(value) not in told:
                return next(means)
            _, result, index = told[id(value)]
            return results[result][index]

        return tf.nest.pack_sequence_as(logs, [whole(value) for value in flat])

    return step_with_global_logs


def _global_means(strategy: KerasStrategy, values: list[Any]) -> list[tf.Tensor]:
    step: Any = current_step()
    tensors = [tf.convert_to_tensor(value) for value in values]
    parts = {i: part_of_global(step, t) for i, t in enumerate(tensors) if t.dtype.is_floating}
    parts |= {i: t for i, t in enumerate(tensors) if t.dtype.is_integer and is_count(step, t)}
    summed = dict(zip(parts, strategy.extended.sum_over_replicas(list(parts.values())), strict=True))
    return [summed.get(i, t) for i, t in enumerate(tensors)]


def _global_results(strategy: KerasStrategy, results: Iterable[Result]) -> dict[Result, list[tf.Tensor]]:
    """Computes, on every replica, the results of metrics from the sums of their states."""
    ordered = list(results)
    summed = iter(strategy.extended.sum_over_replicas([value for result in ordered for value in result.state]))
    numbers = {}
    for result in ordered:
        state = [(variable, next(summed)) for variable in result.metric.variables]
        with _StatelessScope(state_mapping=state):
            numbers[result] = tf.nest.flatten(result.metric.result())
    return numbers
