"""Updates that take the mean gradient of several workers, and drop those of the slowest."""

from __future__ import annotations

import uuid
import weakref
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.partitioned import PartitionedVariable
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.server_state import traced_step


class SyncUpdates:
    """Collects the gradients of an update on the servers, next to the variables.

    A worker's gradient goes to accumulators that know which update it is for, and drop it if that one has been made.
    When enough workers have said that theirs are there, the coordinator has the optimizer take the means.

    Args:
        strategy: The strategy, with `replicas_to_aggregate`.
        model: The model that is updated.
    """

    def __init__(self, strategy: Any, model: Any) -> None:
        self._strategy = strategy
        self._model = weakref.ref(model)
        self._name = f"gradients_{uuid.uuid4().hex}"
        self._update = 0
        self._results: list[Any] = []
        self._variables: list[Any] = []
        self._apply: Any = None

    def wait_for_turn(self) -> int:
        """Waits until a worker is free for another gradient; returns the number of the update that it is for."""
        runner, workers = self._strategy.step_runner, self._strategy.num_workers
        while True:
            runner.wait_until(lambda: self._num_complete() >= self._wanted or self._may_begin(workers))
            if self._num_complete() < self._wanted:
                return self._update
            self._make_update(self._wanted)

    def _may_begin(self, workers: int) -> bool:
        return len(self._results) < workers and self._strategy.step_runner.num_unfinished < workers

    def add(self, result: Any) -> None:
        """Is told of a step whose gradient is for the present update."""
        self._results.append(result)

    def finish(self) -> None:
        """Makes an update of the gradients that are left at the end of an epoch."""
        if self._num_complete():
            self._make_update(min(self._num_complete(), self._wanted))

    def push(self, gradients: list[Any], variables: list[Any], update: tf.Tensor) -> None:
        """Sends a worker's gradients to the accumulators; called while a step is traced."""
        self._variables = [v for v, g in zip(variables, gradients, strict=True) if g is not None]
        for index, (gradient, variable) in enumerate(zip((g for g in gradients if g is not None), self._variables, strict=True)):
            gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
            tf.raw_ops.ResourceAccumulatorApplyGradient(
                handle=self._accumulator(index, variable), local_step=update, gradient=gradient
            )

    @property
    def _wanted(self) -> int:
        return self._strategy.replicas_to_aggregate

    def _num_complete(self) -> int:
        return sum(result.complete for result in self._results)

    def _make_update(self, num_gradients: int) -> None:
        if self._apply is None:
            self._apply = tf.function(self._take_and_apply, autograph=False)
        with self._strategy.scope(), self._strategy.tracing():
            # On the coordinator, which is not done twice: what was taken from the accumulators is gone from them.
            self._apply(tf.constant(num_gradients, tf.int32))
        self._update += 1
        self._results = []

    def _take_and_apply(self, num_gradients: tf.Tensor) -> None:
        gradients = []
        for index, variable in enumerate(self._variables):
            gradient = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=self._accumulator(index, variable),
                num_required=num_gradients,
                dtype=tf.as_dtype(variable.dtype),
            )
            gradients.append(tf.ensure_shape(gradient, variable.shape))
        model: Any = self._model()
        optimizer = model.optimizer
        self._strategy.run(lambda: optimizer.apply(gradients, self._variables))

    def _accumulator(self, index: int, variable: Any) -> tf.Tensor:
        value = variable._value
        place = value.variables[0] if isinstance(value, PartitionedVariable) else value
        with tf.device(place.device):
            return tf.raw_ops.ResourceConditionalAccumulator(
                dtype=tf.as_dtype(variable.dtype),
                shape=variable.shape,
                shared_name=f"{self._name}_{index}",
                reduction_type="MEAN",
            )


def _collect_instead(owner: Any) -> None:
    @replaces(owner, "apply")
    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Hands gradients in, where several workers' gradients make one update."""
        step = traced_step()
        if step is None or step.sync is None:
            return original(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        return step.sync.push(list(grads), variables, step.update)


for _module, _class in (
    ("optimizers.base_optimizer", "BaseOptimizer"),
    ("optimizers.loss_scale_optimizer", "LossScaleOptimizer"),
):
    _collect_instead(keras_internal(_module, _class))
