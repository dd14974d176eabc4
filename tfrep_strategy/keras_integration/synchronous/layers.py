"""What layers do: moving statistics, and the state of random generators, which they keep; the length of sentences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.internals import in_stateless_scope
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.shares import Share

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

    def normalize(self, original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Weighs what a step adds to moving statistics by the examples of the replica, since what is read is their mean.

        Where all replicas have as many examples, which is nearly always, that launches nothing on an accelerator. Where they
        are known to, it is left out.
        """
        step = current_step()
        if not training or not layer.trainable or step is None or not _is_weighed(layer) or step.share.is_known_equal:
            return original(layer, inputs, training=training, mask=mask)
        statistics = [layer.moving_mean, layer.moving_variance]
        before = [tf.convert_to_tensor(variable) for variable in statistics]
        outputs = original(layer, inputs, training=training, mask=mask)
        moved = [tf.convert_to_tensor(variable) for variable in statistics]
        share, weighing = step.share, _weighing(step.share.num_replicas, moved[0].dtype)
        weighed = weighing(share.value, share.is_equal, tf.cast(layer.momentum, moved[0].dtype), *before, *moved)
        for variable, value in zip(statistics, weighed, strict=True):
            variable.assign(value)
        return outputs

    def moments(self, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        """Leaves the statistics of a replica without examples as they are, and synchronizes masked ones, which Keras does not."""
        if layer.synchronized and self.in_replica and self.has_several:
            axes = layer._reduction_axes
            return _moments_of_all(inputs, axes) if mask is None else _masked_moments_of_all(inputs, mask, axes)
        mean, variance = original(layer, inputs, mask)
        if not self.in_replica or layer.synchronized or _is_weighed(layer):
            return mean, variance
        empty = tf.equal(tf.size(inputs), 0)
        return (
            tf.where(empty, tf.cast(layer.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(layer.moving_variance, variance.dtype), variance),
        )

    def vectorize_text(self, original: Any, layer: Any, inputs: Any) -> Any:
        """Pads sentences to the longest one of all replicas, and not of the replica's part."""
        outputs = original(layer, inputs)
        is_padded = layer._output_mode == "int" and not layer._ragged and layer._output_sequence_length is None
        if not is_padded or len(outputs.shape) < 2 or not self.in_replica or not self.has_several:
            return outputs  # One string is no batch.
        replica: Any = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.shape(outputs)[1:]
        placed = tf.one_hot(replica, self.strategy.num_replicas_in_sync, dtype=own.dtype)[:, tf.newaxis] * own
        widest = tf.reduce_max(self.strategy.extended.sum_over_replicas([placed])[0], 0)
        behind = tf.concat([[0], widest - own], 0)
        padded = tf.pad(outputs, tf.stack([tf.zeros_like(behind), behind], 1))
        return tf.ensure_shape(padded, [outputs.shape[0], *[None] * (len(outputs.shape) - 1)])


@functools.cache
def _weighing(num_replicas: int, dtype: tf.DType) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that gives the moving mean and variance which a replica is to have, of any layer.

    It is traced once. A branch for each layer and replica would make the trace of a step longer.
    """

    def weighed(value: Any, is_equal: Any, momentum: Any, mean: Any, variance: Any, *moved: Any) -> list[tf.Tensor]:
        share = Share(value, num_replicas, is_equal)
        return tf.cond(is_equal, lambda: list(moved), lambda: share.of_moving([mean * momentum, variance * momentum], moved))

    scalars = [tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.bool), tf.TensorSpec([], dtype)]
    with tf.init_scope():
        return tf.function(weighed, autograph=False).get_concrete_function(*scalars, *[tf.TensorSpec([None], dtype)] * 4)


def _is_weighed(layer: Any) -> bool:
    """Whether `normalize` weighs what this step adds to the moving statistics of a layer."""
    step = current_step()
    renorm = getattr(layer, "renorm", False)  # Newer than the oldest Keras.
    return step is not None and step.share.num_replicas > 1 and not layer.synchronized and not renorm


def _sums_what_is_written(variable: Any) -> bool:
    """Whether a variable of TensorFlow becomes the sum of what the replicas assign or add to it."""
    is_sum = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
    return is_sum and variable.synchronization != tf.VariableSynchronization.ON_READ


def _is_moving_state(variable: Any) -> bool:
    """Whether replicas assign their own values: floating state of a layer that no gradient reaches."""
    in_layer = _creates_layer_state.value or getattr(variable, "_is_layer_state", False)
    floating = keras.backend.is_float_dtype(variable.dtype)
    return in_layer and floating and not variable.trainable and variable.synchronization == "auto"


def _moments_of_all(inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance, each of shape `[channels]`, of all replicas. Keras has a collective for each of the three sums."""
    context: Any = tf.distribute.get_replica_context()
    entries = tf.cast(tf.reduce_prod([tf.shape(inputs)[axis] for axis in axes]), inputs.dtype)
    own = [tf.reduce_sum(inputs, axes), tf.reduce_sum(tf.square(inputs), axes), entries]
    total, squares, count = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
    mean, mean_square = (tf.math.divide_no_nan(each, tf.stop_gradient(count)) for each in (total, squares))
    return mean, tf.maximum(mean_square - tf.square(mean), 0.0)


def _masked_moments_of_all(inputs: tf.Tensor, mask: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance, each of shape `[channels]`, of the entries of all replicas that are not masked."""
    context: Any = tf.distribute.get_replica_context()
    kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def sums_of_all(*each: tf.Tensor) -> Any:
        own = [tf.reduce_sum(tf.where(kept, values, tf.zeros_like(values)), axes, keepdims=True) for values in each]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    count, total = sums_of_all(tf.ones_like(inputs), inputs)
    count = tf.stop_gradient(count) + keras.backend.epsilon()
    mean = total / count
    (squares,) = sums_of_all(tf.square(inputs - mean))
    variance = squares / count
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
