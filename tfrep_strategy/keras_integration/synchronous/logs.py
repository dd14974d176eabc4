"""What a step returns as its logs, made that of the global batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_share
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase


class Logs(SynchronousBase):
    """What steps and metrics tell."""

    def metrics_result_or_logs(self, original: Any, model: Any, logs: Any) -> Any:
        """Sums the state of all metrics over the processes at once."""
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        with self.strategy.extended.summed_at_once(variables):
            return original(model, logs)


_with_own_logs: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Of each model the phases ("train", "test") whose steps by replicas return more than the results of its metrics."""

_one_device: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Of each model the phases whose last steps were one device's, so that their logs are those of the global batch."""


def note_one_device(model: Any, phase: str, is_one_device: bool) -> None:
    """Notes whether the steps that a model has just run were one device's."""
    phases = _one_device.setdefault(model, set())
    (phases.add if is_one_device else phases.discard)(phase)


def logs_of_all(model: Any, phase: str, logs: Any) -> Any:
    """Returns the logs of a step of all replicas; every process has to ask."""
    if phase in _one_device.get(model, ()) or phase in _with_own_logs.get(model, ()):
        return logs
    return model._get_metrics_result_or_logs(logs)


def with_global_logs(model: Any, phase: str, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the step of a replica, so that floating scalars in its logs are means over the examples of all replicas.

    Results of metrics are read over all replicas when somebody asks.
    """
    own_logs = _with_own_logs.setdefault(model, set())

    def step_with_global_logs(batch: Any) -> Any:
        logs = step_function(batch)
        own_logs.discard(phase)
        if isinstance(logs, dict) and set(logs) == set(model.get_metrics_result()):
            return logs
        own_logs.add(phase)
        share = current_share()
        assert share is not None
        flat = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
        places = [i for i, value in enumerate(flat) if value.dtype.is_floating and not value.shape.rank]
        summed = strategy.extended.sum_over_replicas([share.weigh(flat[i]) for i in places])
        known = dict(zip(places, summed, strict=True))
        return tf.nest.pack_sequence_as(logs, [known.get(i, value) for i, value in enumerate(flat)])

    return step_with_global_logs
