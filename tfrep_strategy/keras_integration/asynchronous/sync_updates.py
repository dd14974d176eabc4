"""Updates from the mean gradient of several workers. Gradients of the slowest workers are dropped."""

from __future__ import annotations

import uuid
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import PartitionedVariable
from tfrep_strategy.keras_integration.asynchronous.state import AsyncStep, traced_step
from tfrep_strategy.keras_integration.driver import KerasDriver


class Updates(KerasDriver):
    """Operations on gradients."""

    def apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Pushes gradients, if gradients of several workers make one update."""
        step = traced_step.value
        if step is None or step.sync is None:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        return step.sync.push(optimizer, list(grads), variables, step)

    apply_scaled = apply


class SyncUpdates:
    """Collects the gradients of an update on the servers, next to the variables.

    A worker's gradient goes to accumulators that know the current update, and drop gradients of earlier ones.
    When enough workers have done their step, the coordinator lets the optimizers apply the means.

    Args:
        strategy: The strategy, with `replicas_to_aggregate`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._name = f"gradients_{uuid.uuid4().hex}"
        self._update = 0
        self._results: list[Any] = []
        self._variables: dict[Any, dict[int, Any]] = {}
        """For each optimizer, in the order of use in a step: the Keras variables that have gradients, by their ids."""
        self._apply: Any = None

    def wait_for_turn(self) -> int:
        """Waits until a worker is free for another gradient, or data has ended.

        Returns:
            The number of the update that the gradient belongs to.
        """
        runner = self._strategy.extended.step_runner
        while True:
            runner.wait_until(lambda: self._num_pushed() >= self._wanted or self._may_begin() or self._is_out_of_data())
            if self._num_pushed() < self._wanted:
                return self._update
            self._make_update()

    def _may_begin(self) -> bool:
        workers = self._strategy.num_workers
        return len(self._results) < workers and self._strategy.extended.step_runner.num_unfinished < workers

    def _is_out_of_data(self) -> bool:
        return any(result.out_of_data for result in self._results)

    def add(self, result: Any) -> None:
        """Records a step whose gradient belongs to the present update."""
        self._results.append(result)

    def finish(self) -> None:
        """Makes an update from the remaining gradients at the end of an epoch."""
        if self._num_pushed():
            self._make_update()
        self._results = []

    def close(self) -> None:
        """Frees the accumulators. Programs that use them must not run afterwards."""
        for optimizer, variables in self._variables.items():
            for variable in variables.values():
                tf.raw_ops.DestroyResourceOp(resource=self._accumulator(optimizer, variable))

    def push(self, optimizer: Any, gradients: list[Any], variables: list[Any], step: AsyncStep) -> None:
        """Sends a worker's gradients to the accumulators; called while a step is traced.

        Raises:
            ConfigurationError: The step has already given this optimizer a gradient of the same variable.
        """
        known = self._variables.setdefault(optimizer, {})
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                if (optimizer, id(variable)) in step.pushed and self._strategy.num_replicas_in_sync == 1:
                    raise ConfigurationError(
                        message(
                            "A step updates a variable twice, but with sync=True updates are made after the step.",
                            hint="apply the optimizer once per step and variable, or train without sync=True.",
                            variable=variable.path,
                        )
                    )
                step.pushed.add((optimizer, id(variable)))
                known[id(variable)] = variable
                tf.raw_ops.ResourceAccumulatorApplyGradient(
                    handle=self._accumulator(optimizer, variable),
                    local_step=step.update,
                    gradient=tf.cast(tf.convert_to_tensor(gradient), variable.dtype),
                )

    @property
    def _wanted(self) -> int:
        return self._strategy.replicas_to_aggregate

    def _num_pushed(self) -> int:
        return sum(result.has_value for result in self._results)

    def _make_update(self) -> None:
        with self._strategy.scope(), self._strategy.extended.tracing():
            if self._apply is None:
                for optimizer, variables in self._variables.items():
                    if not optimizer.built:
                        optimizer.build(list(variables.values()))
                self._apply = tf.function(self._take_and_apply, autograph=False)
            # This runs on the coordinator and must not be repeated: gradients that were taken are gone from the accumulators.
            self._apply(tf.constant(self._update, tf.int64))
        self._update += 1
        self._results = []

    def _take_and_apply(self, update: tf.Tensor) -> None:
        for optimizer, known in self._variables.items():
            variables = list(known.values())
            handles = [self._accumulator(optimizer, variable) for variable in variables]
            counts = [tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=handle) for handle in handles]

            def apply(optimizer: Any = optimizer, variables: Any = variables, handles: Any = handles) -> None:
                gradients = [_take(handle, variable) for handle, variable in zip(handles, variables, strict=True)]
                self._strategy.run(lambda: optimizer.apply(gradients, variables))

            # A step may skip an optimizer (`tf.cond`), and taking its gradient would wait forever.
            tf.cond(tf.reduce_min(tf.stack(counts)) > 0, apply, lambda: None)
            for handle in handles:
                tf.raw_ops.ResourceAccumulatorSetGlobalStep(handle=handle, new_global_step=update + 1)

    def _accumulator(self, optimizer: Any, variable: Any) -> tf.Tensor:
        value = variable._value
        place = value.variables[0] if isinstance(value, PartitionedVariable) else value
        of_optimizer, of_variable = list(self._variables).index(optimizer), list(self._variables[optimizer]).index(id(variable))
        with tf.device(place.device):
            return tf.raw_ops.ResourceConditionalAccumulator(
                dtype=tf.as_dtype(variable.dtype),
                shape=variable.shape,
                shared_name=f"{self._name}_{of_optimizer}_{of_variable}",
                reduction_type="MEAN",
            )


def _take(handle: tf.Tensor, variable: Any) -> tf.Tensor:
    """Takes the mean of all gradients in an accumulator."""
    dtype = tf.as_dtype(variable.dtype)
    gradient = tf.raw_ops.ResourceAccumulatorTakeGradient(handle=handle, num_required=1, dtype=dtype)
    return tf.ensure_shape(gradient, variable.shape)
