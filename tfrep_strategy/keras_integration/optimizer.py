"""Aggregate first: an optimizer sees the global gradient before it checks, clips, accumulates or applies anything."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.gradients import dense, multiply_no_nan, weighed, zero_unless
from tfrep_strategy.keras_integration.layers import creating_partial_sums
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_step, current_strategy, replica_strategy

_BaseOptimizer = keras_internal("optimizers.base_optimizer", "BaseOptimizer")
_TFOptimizer = keras_internal("backend.tensorflow.optimizer", "TFOptimizer")
_LossScaleOptimizer = keras_internal("optimizers.loss_scale_optimizer", "LossScaleOptimizer")

_OUTSIDE_REPLICAS = (
    "An optimizer is applied outside `strategy.run`. Gradients that are computed there too are computed for the whole batch by"
    " every process: right, but no faster than one device.\n"
    "Hint: strategy.run(step, args=(batch,)) with batches of strategy.experimental_distribute_dataset(...), or a `train_step`."
)


class _Phase(threading.local):
    """What this replica's thread is applying: nothing, global gradients, or local ones that become global later."""

    gradients: str | None = None
    variables: tuple[Any, ...] = ()
    builds_inner = False
    """Whether it builds an optimizer that another one wraps."""


_phase = _Phase()


@contextlib.contextmanager
def _applying(gradients: str) -> Iterator[None]:
    before, _phase.gradients = _phase.gradients, gradients
    try:
        yield
    finally:
        _phase.gradients = before


def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
    strategy = current_strategy()
    if strategy is None or _phase.gradients is not None:
        return original(optimizer, grads, trainable_variables)
    if replica_strategy() is None:
        if strategy.num_replicas_in_sync > 1:
            warnings.warn(_OUTSIDE_REPLICAS, stacklevel=2)
        with _applying("global"):
            return original(optimizer, strategy.mean_over_processes(list(grads)), trainable_variables)
    grads, share = _to_be_weighed(optimizer, list(grads))
    if _accumulates_locally(optimizer, strategy):
        own = [weighed(dense(g), share) for g in grads]  # Keras collects in dense variables.
        with _applying("local"):
            return original(optimizer, own, trainable_variables)
    with _applying("global"):
        return original(optimizer, strategy.aggregate_gradients(grads, share), trainable_variables)


def _to_be_weighed(optimizer: Any, grads: list[Any]) -> tuple[list[Any], tf.Tensor | None]:
    """Returns the gradients and what they have to be multiplied by, which is None where their loss was."""
    step = current_step()
    if step is None:
        return grads, None
    if not step.scaled_losses[id(optimizer)]:
        return grads, step.share
    step.scaled_losses[id(optimizer)] -= 1
    return zero_unless(step.num_examples > 0, grads), None


def _scale_by_share(original: Any, self: Any, loss: Any) -> Any:
    """Applies the replica's share to the loss itself where the step gives the chance.

    Backward then computes what one device would, in the same range, which decides about overflow in half precision, and
    the gradients need no multiplication of their own.
    """
    step = current_step()
    loss = original(self, loss)
    if step is None:
        return loss
    step.scaled_losses[id(self)] += 1
    return multiply_no_nan(loss, step.share)


replaces(_BaseOptimizer, "scale_loss")(_scale_by_share)
replaces(_LossScaleOptimizer, "scale_loss")(_scale_by_share)


def _accumulates_locally(optimizer: Any, strategy: KerasStrategy) -> bool:
    """Whether replicas collect gradients of their own and talk only on the steps that update.

    That needs a collective inside `tf.cond`. Within one process all steps aggregate, which costs no message.
    """
    return bool(optimizer.gradient_accumulation_steps) and strategy.collectives_in_branches


@replaces(_BaseOptimizer, "apply")
def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Makes the gradients global, then lets every replica do the update that one device would do."""
    return _apply(original, self, grads, trainable_variables)


@replaces(_LossScaleOptimizer, "apply")
def apply_scaled(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Makes an overflow on one replica an overflow of the global gradient, which all replicas skip."""
    return _apply(original, self, grads, trainable_variables)


if not hasattr(_BaseOptimizer, "minimize"):

    def minimize(self: Any, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> Any:
        """Takes the gradient of a loss and applies it, as the optimizers of Keras 2 did.

        Args:
            loss: A scalar tensor, with the `tape` that has recorded it, or a function that returns one.
            var_list: Keras variables, or a function that returns them.
            tape: A `tf.GradientTape`; needed where `loss` is a tensor.

        Raises:
            ConfigurationError: `loss` is a tensor and there is no tape.
        """
        if not callable(loss):
            if tape is None:
                raise ConfigurationError(
                    message("A loss that is a tensor has no gradient of itself.", hint="pass its tape=...", loss=loss)
                )
        else:
            tape = tf.GradientTape() if tape is None else tape
            with tape:
                loss = loss()
        variables = list(var_list() if callable(var_list) else var_list)
        with tape:  # Records the scaling too.
            scaled = self.scale_loss(loss)
        return self.apply(tape.gradient(scaled, variables), variables)

    # Scripts that were written for Keras 2 call it; Keras 3 has left it out.
    _BaseOptimizer.minimize = minimize


@replaces(_BaseOptimizer, "_backend_apply_gradients")
def apply_to_variables(original: Any, self: Any, grads: Any, trainable_variables: Any) -> None:
    """Notes whose gradients an update clips."""
    before, _phase.variables = _phase.variables, tuple(trainable_variables)
    try:
        original(self, grads, trainable_variables)
    finally:
        _phase.variables = before


@replaces(_BaseOptimizer, "_clip_gradients")
def clip_gradients(original: Any, self: Any, grads: Any) -> Any:
    """Makes accumulated gradients global, and transforms them, before anything looks at them: an update begins here."""
    strategy: Any = current_strategy()
    if strategy is None or _phase.gradients is None:
        return original(self, grads)
    if _phase.gradients == "local":
        grads = strategy.aggregate_gradients(list(grads), None)
    with _applying("global"):
        return original(self, strategy.transform_gradients(list(grads), _phase.variables))


@replaces(_LossScaleOptimizer, "build")
def build_with_inner(original: Any, self: Any, var_list: Any) -> None:
    """Notes that the optimizer inside is built for global gradients."""
    _phase.builds_inner = True
    try:
        original(self, var_list)
    finally:
        _phase.builds_inner = False


@replaces(_TFOptimizer, "add_variable_from_reference")
def add_variable_from_reference(original: Any, self: Any, reference_variable: Any, name: Any = None, **kwargs: Any) -> Any:
    """Lets gradient accumulators hold a part of the sum on each process, and be saved as their sum."""
    strategy = current_strategy()
    accumulates = name == "gradient_accumulator" and strategy is not None and _accumulates_locally(self, strategy)
    accumulates = accumulates and not _phase.builds_inner  # That one gets gradients which are global already.
    with creating_partial_sums() if accumulates else contextlib.nullcontext():
        return original(self, reference_variable, name=name, **kwargs)


def _on_each_replica(name: str) -> None:
    """Replaces a method of Keras's TensorFlow optimizer, which coordinates replicas, by that of its base class.

    With global gradients there is nothing left to coordinate.
    """
    single_device = getattr(_BaseOptimizer, name)

    @replaces(_TFOptimizer, name)
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if current_strategy() is None else single_device)(self, *args, **kwargs)


for _name in (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
):
    _on_each_replica(_name)


@replaces(_LossScaleOptimizer, "_tf_apply")
def apply_scaled_on_each_replica(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Applies global gradients as one device does, outside replicas too, where Keras refuses."""
    if current_strategy() is None:
        original(self, grads, trainable_variables=trainable_variables)
    else:
        self._common_apply(grads, trainable_variables=trainable_variables)
