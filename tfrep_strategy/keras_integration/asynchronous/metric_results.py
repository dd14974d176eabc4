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


Told = dict[int, tuple[tf.Tensor, Result | None, int]]
"""By their ids, the numbers that metrics have told, with the results that they belong to and their places in these.

Numbers of which nothing is left to do belong to None.
"""

told: Setting[Told | None] = Setting(None)
"""What metrics have told the step that this thread traces; None where nobody notes it."""


@contextlib.contextmanager
def noted_results(metrics: Iterable[Any]) -> Iterator[Told]:
    """Notes what metrics tell the step that this thread traces, until the block ends."""
    for metric in metrics:
        KerasDriver.metric_result.install_in(type(metric))
    noted: Told = {}
    with told.to(noted):
        yield noted


class MetricResults(KerasDriver):
    """What metrics tell."""

    def metric_result(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Notes which tensors are results of a metric. What it asks metrics of its own for is none of them."""
        noted = told.value
        with told.to(None):
            value = original(metric, *args, **kwargs)
            if noted is not None:
                value = self.noted(noted, metric, value)
        return value

    def noted(self, noted: Told, metric: Any, value: Any) -> Any:
        """Notes the result of a metric, and returns what the step is to see."""
        result = Result(metric)
        for index, tensor in enumerate(tf.nest.flatten(value)):
            # The tensor is kept, so that no other one gets its id.
            noted[id(tensor)] = tensor, result, index
        return value
