"""What a step returns as its logs, made that of the global batch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.gradients import multiply_no_nan
from tfrep_strategy.keras_integration.patching import keras_internal
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_step

_StatelessScope = keras_internal("backend.common.stateless_scope", "StatelessScope")

Place = tuple[Any, int]
"""A metric, and which of the numbers of its result."""


class _Results(threading.local):
    """The results of metrics that this replica's thread has asked for in the step that it traces."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[tf.Tensor, Place]] | None = None


_results = _Results()


def with_global_logs(model: Any, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step whose logs are more than the model's metrics, so that they are those of the global batch.

    Where the logs are exactly the metrics, nothing is done: Keras reads these over all replicas when somebody asks. Else a
    result of a metric is computed from its state on all replicas, and another floating value, such as a bare loss, is the
    mean over the examples of the global batch.
    """
    for metric in model.metrics:
        _note_results(type(metric))

    def step_with_global_logs(batch: Any) -> Any:
        with _noting_results() as places:
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
    weighed = [multiply_no_nan(t, step.share) for t in tensors if t.dtype.is_floating]
    summed = iter(strategy.sum_over_replicas(weighed))
    return [next(summed) if t.dtype.is_floating else t for t in tensors]


def _global_results(strategy: KerasStrategy, metrics: list[Any]) -> dict[int, list[tf.Tensor]]:
    """Computes, on every replica, the results of metrics from the sums of their states."""
    variables = [variable for metric in metrics for variable in metric.variables]
    summed = strategy.sum_over_replicas([tf.convert_to_tensor(variable.value) for variable in variables])
    with _StatelessScope(state_mapping=list(zip(variables, summed, strict=True))):
        return {id(metric): tf.nest.flatten(metric.result()) for metric in metrics}


@contextlib.contextmanager
def _noting_results() -> Iterator[dict[int, tuple[tf.Tensor, Place]]]:
    before, _results.places = _results.places, {}
    try:
        yield _results.places
    finally:
        _results.places = before


def _note_results(kind: type) -> None:
    """Has a class of metrics tell which tensors are its results."""
    for owner in kind.__mro__:
        result = vars(owner).get("result")
        if result is not None and not hasattr(result, "is_noted"):
            owner.result = _noting(result)  # type: ignore[attr-defined]


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(self, *args, **kwargs)
        if _results.places is not None:
            for index, tensor in enumerate(tf.nest.flatten(value)):
                # The tensor is kept, so that no other one gets its id.
                _results.places[id(tensor)] = tensor, (self, index)
        return value

    result.is_noted = True  # type: ignore[attr-defined]
    return result
