"""State that layers keep: moving statistics, and the state of random generators."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.gradients import multiply_no_nan
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import current_step, current_strategy, replica_strategy

_Variable = keras_internal("backend.tensorflow.core", "Variable")
_GOLDEN = 0x9E3779B9


class _Creating(threading.local):
    """What the variables that this thread creates are for."""

    layer_state = False
    partial_sums = False


_creating = _Creating()


@contextlib.contextmanager
def creating_partial_sums() -> Iterator[None]:
    """Makes variables of which every process holds a part; outside a replica they read as the sum."""
    _creating.partial_sums = True
    try:
        yield
    finally:
        _creating.partial_sums = False


@replaces(keras.layers.Layer, "add_weight")
def add_weight(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks what `add_weight` makes as state of a layer, as opposed to state of an optimizer."""
    _creating.layer_state = True
    try:
        variable = original(self, *args, **kwargs)
    finally:
        _creating.layer_state = False
    variable._is_layer_state = True
    return variable


def _is_moving_state(variable: Any) -> bool:
    """Whether replicas assign their own values: floating state of a layer that no gradient reaches."""
    in_layer = _creating.layer_state or getattr(variable, "_is_layer_state", False)
    floating = keras.backend.is_float_dtype(variable.dtype)
    return in_layer and floating and not variable.trainable and variable.synchronization == "auto"


@replaces(_Variable, "_map_synchronization")
def map_synchronization(original: Any, self: Any, synchronization: str) -> Any:
    """Lets every replica keep moving statistics of its own between the moments when somebody reads them."""
    if current_strategy() is not None and (_creating.partial_sums or _is_moving_state(self)):
        return tf.VariableSynchronization.ON_READ
    return original(self, synchronization)


@replaces(_Variable, "_map_aggregation")
def map_aggregation(original: Any, self: Any, aggregation: str) -> Any:
    """Reads moving statistics as their mean, and lets counters be counted on each replica alike."""
    if current_strategy() is not None:
        if _creating.partial_sums:
            return tf.VariableAggregation.SUM
        if _is_moving_state(self):
            return tf.VariableAggregation.MEAN
        if aggregation == "only_first_replica":
            return tf.VariableAggregation.NONE
    return original(self, aggregation)


@replaces(keras.random.SeedGenerator, "next")
def next_seed(original: Any, self: Any, ordered: bool = True) -> Any:
    """Gives each replica another seed, and replica 0 that of one device; the generator's state stays equal everywhere."""
    seed = original(self, ordered=ordered)
    strategy = replica_strategy()
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return seed
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # The same operations on every replica, so that all trace the same program.
    offset = tf.cast(replica, tf.int64) * _GOLDEN % 2**32
    return seed + tf.cast(tf.stack([tf.zeros_like(offset), offset]), seed.dtype)


@replaces(keras.layers.BatchNormalization, "_moments")
def moments(original: Any, self: Any, inputs: Any, mask: Any) -> Any:
    """Leaves the statistics of a replica without examples as they are, and synchronizes masked ones, which Keras does not."""
    strategy = replica_strategy()
    if self.synchronized and mask is not None and strategy is not None and strategy.num_replicas_in_sync > 1:
        return _masked_moments_of_all(inputs, mask, self._reduction_axes)
    mean, variance = original(self, inputs, mask)
    if strategy is None or self.synchronized or _is_weighed(self):
        return mean, variance
    empty = tf.equal(tf.size(inputs), 0)
    return (
        tf.where(empty, tf.cast(self.moving_mean, mean.dtype), mean),
        tf.where(empty, tf.cast(self.moving_variance, variance.dtype), variance),
    )


@replaces(keras.layers.BatchNormalization, "call")
def call(original: Any, self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    """Weighs what a step adds to moving statistics by the examples of the replica, since what is read is their mean.

    Where all replicas have as many examples, which is nearly always, that launches nothing on an accelerator.
    """
    step = current_step()
    if not training or not self.trainable or step is None or not _is_weighed(self):
        return original(self, inputs, training=training, mask=mask)
    statistics = [self.moving_mean, self.moving_variance]
    before = [tf.convert_to_tensor(variable) for variable in statistics]
    outputs = original(self, inputs, training=training, mask=mask)

    def weigh() -> None:
        weight = step.share * step.strategy.num_replicas_in_sync
        for variable, value in zip(statistics, before, strict=True):
            kept = value * self.momentum
            # A replica without examples adds nothing; what it has computed is no number.
            variable.assign(kept + multiply_no_nan(tf.convert_to_tensor(variable) - kept, weight))

    tf.cond(step.has_equal_share, lambda: None, weigh)
    return outputs


def _is_weighed(layer: Any) -> bool:
    """Whether `call` weighs what this step adds to the moving statistics of a layer."""
    step = current_step()
    return step is not None and step.strategy.num_replicas_in_sync > 1 and not layer.synchronized and not layer.renorm


def _masked_moments_of_all(inputs: tf.Tensor, mask: tf.Tensor, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance, each of shape `[channels]`, of the entries of all replicas that are not masked."""
    context: Any = tf.distribute.get_replica_context()
    kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def sum_of_all(values: tf.Tensor) -> tf.Tensor:
        own = tf.reduce_sum(tf.where(kept, values, tf.zeros_like(values)), axes, keepdims=True)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    count = sum_of_all(tf.ones_like(inputs)) + keras.backend.epsilon()
    mean = sum_of_all(inputs) / count
    variance = sum_of_all(tf.square(inputs - mean)) / count
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
