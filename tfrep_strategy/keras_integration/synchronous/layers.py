"""What layers do: moving statistics, and the state of random generators, which they keep."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.internals import in_stateless_scope
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_GOLDEN = 0x9E3779B9

creates_partial_sums = Setting(False)
"""Whether replicas hold parts of the variables that are made, which read as the sum outside replicas."""

_creates_layer_state = Setting(False)
"""Whether the variables that are made are state of a layer, as opposed to state of an optimizer."""


class Layers(SynchronousBase):
    """What layers and their variables do."""

    def add_weight(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Marks what `add_weight` makes as state of a layer, for when it is made later than asked for."""
        with _creates_layer_state.to(True):
            variable = original(layer, *args, **kwargs)
        variable._is_layer_state = True
        return variable

    def initialize_variable(self, original: Any, variable: Any, value: Any) -> None:
        """Lets every replica keep moving statistics of its own between the moments when somebody reads them.

        Such a variable reads as its mean, parts of a sum as the sum. A counter is counted on each replica alike.
        """
        told = variable._synchronization, variable._aggregation
        if creates_partial_sums.value:
            kept = "on_read", "sum"
        elif _is_moving_state(variable):
            kept = "on_read", "mean"
        else:
            kept = told[0], "none" if told[1] == "only_first_replica" else told[1]
        variable._synchronization, variable._aggregation = kept
        try:
            original(variable, value)
        finally:
            variable._synchronization, variable._aggregation = told

    def add_to_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Sums what replicas add to a variable that asks for sums; Keras assigns, which would sum its old value, too."""
        return value if self._adds_up(variable, "assign_add", value) else original(variable, value)

    def subtract_from_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Does the same with what is taken away."""
        return value if self._adds_up(variable, "assign_sub", value) else original(variable, value)

    def _adds_up(self, variable: Any, method: str, value: Any) -> bool:
        if not self.in_replica or in_stateless_scope() or not _sums_what_is_written(variable._value):
            return False
        value = variable._convert_to_tensor(value, dtype=variable._dtype)
        getattr(variable._value, method)(tf.broadcast_to(value, variable.shape))
        return True

    def next_seed(self, original: Any, generator: Any, ordered: bool = True) -> Any:
        """Gives each replica another seed, and replica 0 that of one device; the generator's state stays equal everywhere."""
        seed = original(generator, ordered=ordered)
        # What an optimizer adds to the one value of a variable is one number, too.
        if not self.in_replica or not self.has_several or assigns_as_is.value:
            return seed
        context: Any = tf.distribute.get_replica_context()
        # The same operations on every replica, so that all trace the same program.
        offset = tf.cast(context.replica_id_in_sync_group, tf.int64) * _GOLDEN % 2**32
        return seed + tf.cast(tf.stack([tf.zeros_like(offset), offset]), seed.dtype)

    def moments(self, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        """Leaves the statistics of a replica without examples as they are."""
        mean, variance = original(layer, inputs, mask)
        if not self.in_replica or layer.synchronized:
            return mean, variance
        empty = tf.equal(tf.size(inputs), 0)
        return (
            tf.where(empty, tf.cast(layer.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(layer.moving_variance, variance.dtype), variance),
        )


def _sums_what_is_written(variable: Any) -> bool:
    """Whether a variable of TensorFlow becomes the sum of what the replicas assign or add to it."""
    is_sum = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
    return is_sum and variable.synchronization != tf.VariableSynchronization.ON_READ


def _is_moving_state(variable: Any) -> bool:
    """Whether replicas assign their own values: floating state of a layer that no gradient reaches."""
    in_layer = _creates_layer_state.value or getattr(variable, "_is_layer_state", False)
    floating = keras.backend.is_float_dtype(variable.dtype)
    return in_layer and floating and not variable.trainable and variable.synchronization == "auto"
