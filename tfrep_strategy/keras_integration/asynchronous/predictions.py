"""Predictions that workers make, each of a few batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.asynchronous.step_layout import StepLayout
from tfrep_strategy.keras_integration.asynchronous.steps import StepFunction, as_tensors, run_on_worker
from tfrep_strategy.keras_integration.internals import concat, convert_to_np_if_not_ragged


class PredictFunction(StepFunction):
    """Stands where Keras keeps its compiled prediction; a call returns a result to come."""

    def __call__(self, batches: Any) -> Any:
        data = tuple(as_tensors(batch) for batch in batches)
        concrete, layout = self._trace(data)
        arguments = (data, tf.zeros([2], tf.int64)) if layout.is_numbered else (data,)
        return Prediction(self.strategy, self._runner.schedule(concrete, arguments))

    def drain(self) -> None:
        """Has nothing to wait for: whoever needs a prediction waits for it."""

    def _steps(self, data: Any, on_worker: bool, layout: StepLayout, number: tf.Tensor | None = None) -> Any:
        outputs = [run_on_worker(self.strategy, self._step_function, batch, "concat") for batch in data]
        return keras.tree.map_structure(lambda *parts: parts[0] if len(parts) == 1 else concat(parts), *outputs)


class Prediction:
    """The outputs of a step that a worker may not have done yet.

    Args:
        strategy: The strategy of the model.
        result: What the coordinator has returned for the step.
    """

    def __init__(self, strategy: Any, result: Any) -> None:
        self.strategy, self._result = strategy, result

    def get(self) -> Any:
        """Waits for the outputs, and returns them."""
        self.strategy.extended.step_runner.wait_for(self._result)
        return self._result.get()

    def numpy(self) -> Any:
        """Waits for the outputs, and returns them as Keras does those of a batch."""
        return keras.tree.map_structure(convert_to_np_if_not_ragged, self.get())
