"""Which values of a step are results of metrics. Others, such as a bare loss, may have the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.settings import Setting


class Result:
    """What a step has asked a metric for: the metric, and its state at that moment, since the step may go on to update it."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.state = [tf.convert_to_tensor(variable.value) for variable in metric.variables]


Told = dict[int, tuple[tf.Tensor, Result, int]]
"""By their ids, the numbers that metrics have told, with the results that they belong to and their places in these."""

_told: Setting[Told | None] = Setting(None)


@contextlib.contextmanager
def noted_results(metrics: Iterable[Any]) -> Iterator[Told]:
    """Notes what metrics tell the step that this thread traces, until the block ends."""
    for metric in metrics:
        KerasDriver.metric_result.install_in(type(metric))
    told: Told = {}
    with _told.to(told):
        yield told


class MetricResults(KerasDriver):
    """What metrics tell."""

    def metric_result(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Notes which tensors are results of a metric."""
        value = original(metric, *args, **kwargs)
        if _told.value is not None:
            result = Result(metric)
            for index, tensor in enumerate(tf.nest.flatten(value)):
                # The tensor is kept, so that no other one gets its id.
                _told.value[id(tensor)] = tensor, result, index
        return value
