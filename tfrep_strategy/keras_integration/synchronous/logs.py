"""What a step returns as its logs, made that of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.patching import keras_internal
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_StatelessScope = keras_internal("backend.common.stateless_scope", "StatelessScope")

Place = tuple[Any, int]
"""A metric, and which of the numbers of its result."""


_results: Setting[dict[int, tuple[tf.Tensor, Place]] | None] = Setting(None)
"""The results of metrics that this replica's thread has asked for in the step that it traces."""


class Logs(SynchronousBase):
    """What metrics tell."""

    def metrics_result_or_logs(self, original: Any, model: Any, logs: Any) -> Any:
        """Sums the state of all metrics over the processes at once."""
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        with self.strategy.extended.summed_at_once(variables):
            return original(model, logs)

    def metric_result(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Notes which tensors are results of a metric."""
        value = original(metric, *args, **kwargs)
        if _results.value is not None:
            for index, tensor in enumerate(tf.nest.flatten(value)):
                # The tensor is kept, so that no other one gets its id.
                _results.value[id(tensor)] = tensor, (metric, index)
        return value


def with_global_logs(model: Any, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step whose logs are more than the model's metrics, so that they are those of the global batch.

    Where the logs are exactly the metrics, nothing is done: Keras reads these over all replicas when somebody asks. Else a
    result of a metric is computed from its state on all replicas, and another floating value, such as a bare loss, is the
    mean over the examples of the global batch.
    """
    for metric in model.metrics:
        KerasDriver.metric_result.install_in(type(metric))

    def step_with_global_logs(batch: Any) -> Any:
        places: dict[int, tuple[tf.Tensor, Place]] = {}
        with _results.to(places):
            logs = step_function(batch)
        if isinstance(logs, dict) and set(logs) == set(model.get_metrics_result()):
            return logs
        flat = tf.nest.flatten(logs)
        noted = [places[id(value)][1] if id(value) in places else None for value in flat]
        metrics = list({id(place[0]): place[0] for place in noted if place is not None}.values())
        results = _global_results(strategy, metrics)
        means = iter(_global_means(strategy, [v for v, place in zip(flat, noted, strict=True) if place is None]))
        return tf.nest.pack_sequence_as(
            logs, [next(means) if place is None else results[id(place[0])][place[1]] for place in noted]
        )

    return step_with_global_logs


def _global_means(strategy: KerasStrategy, values: list[Any]) -> list[tf.Tensor]:
    step: Any = current_step()
    tensors = [tf.convert_to_tensor(value) for value in values]
    weighed = [step.share.weigh(t) for t in tensors if t.dtype.is_floating]
    summed = iter(strategy.extended.sum_over_replicas(weighed))
    return [next(summed) if t.dtype.is_floating else t for t in tensors]


def _global_results(strategy: KerasStrategy, metrics: list[Any]) -> dict[int, list[tf.Tensor]]:
    """Computes, on every replica, the results of metrics from the sums of their states."""
    variables = [variable for metric in metrics for variable in metric.variables]
    summed = strategy.extended.sum_over_replicas([tf.convert_to_tensor(variable.value) for variable in variables])
    with _StatelessScope(state_mapping=list(zip(variables, summed, strict=True))):
        return {id(metric): tf.nest.flatten(metric.result()) for metric in metrics}
