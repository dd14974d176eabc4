"""Layers, losses and metrics in replicas that run their own steps, and the state of layers.

In a custom training loop gradients are summed, as under TensorFlow's strategies, and a mean divides by the count of all
replicas. In a step whose replicas have local batches, a loss is the mean over the replica's examples, and its share
(`core/step.py`) weights the gradient later (`optimizer.py`). A one-device step needs none of this.

Some losses compare the rows of a batch with each other. Their value on a part of a batch says nothing about the whole, so no
weights could correct it. Every replica computes such a loss of the global batch, from rows that were gathered with their gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, MutableSequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfrep_strategy.core.scoped import Setting, assigns_as_is
from tfrep_strategy.core.step import KerasStrategy, current_share
from tfrep_strategy.keras_integration.distribution import cut_of_layout
from tfrep_strategy.keras_integration.internals import in_stateless_scope, masking
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_GOLDEN = 0x9E3779B9

creates_partial_sums = Setting(False)
"""Whether each replica holds an addend of new variables, which read as the sum outside replicas."""

_creates_layer_state = Setting(False)
"""Whether new variables are state of a layer, as opposed to state of an optimizer."""


class Layers(SynchronousBase):
    """Operations of layers and their variables."""

    def add_weight(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Marks variables of `add_weight` as state of a layer, because some are made later."""
        with _creates_layer_state.to(True):
            variable = original(layer, *args, **kwargs)
        variable._is_layer_state = True
        return variable

    def initialize_variable(self, original: Any, variable: Any, value: Any) -> None:
        """Lets every replica keep its own moving statistics until they are read.

        Such a variable reads as its mean, and a partial sum as the sum. Counters are equal on all replicas.
        """
        requested = variable._synchronization, variable._aggregation
        if creates_partial_sums.value:
            kept = "on_read", "sum"
        elif _is_moving_state(variable):
            kept = "on_read", "mean"
        else:
            kept = requested[0], "none" if requested[1] == "only_first_replica" else requested[1]
        variable._synchronization, variable._aggregation = kept
        extended = self.strategy.extended
        cut = extended.cut_of_new_variables.value or cut_of_layout(
            variable, value, self.strategy.num_replicas_in_sync, extended.model_size
        )
        try:
            with extended.cut_of_new_variables.to(cut):
                original(variable, value)
        finally:
            variable._synchronization, variable._aggregation = requested

    def add_to_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Sums the increments of replicas to a variable that asks for sums. Keras assigns, which would also sum the old value."""
        return value if self._adds_up(variable, "assign_add", value) else original(variable, value)

    def subtract_from_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Does the same for decrements."""
        return value if self._adds_up(variable, "assign_sub", value) else original(variable, value)

    def _adds_up(self, variable: Any, method: str, value: Any) -> bool:
        if not self.in_replica or in_stateless_scope() or not _sums_what_is_written(variable._value):
            return False
        value = variable._convert_to_tensor(value, dtype=variable._dtype)
        getattr(variable._value, method)(tf.broadcast_to(value, variable.shape))
        return True

    def next_seed(self, original: Any, generator: Any, ordered: bool = True) -> Any:
        """Gives each replica a different seed, and replica 0 one device's seed. The generator's state stays equal everywhere."""
        seed = original(generator, ordered=ordered)
        # An optimizer must add the same numbers on all replicas to the one value of a variable.
        if not self.in_replica or not self.has_several or assigns_as_is.value:
            return seed
        context: Any = tf.distribute.get_replica_context()
        # Every replica builds the same operations, so that all trace the same program.
        offset = tf.cast(context.replica_id_in_sync_group, tf.int64) * _GOLDEN % 2**32
        return seed + tf.cast(tf.stack([tf.zeros_like(offset), offset]), seed.dtype)

    def moments(self, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        """Keeps the statistics of a replica without examples."""
        mean, variance = original(layer, inputs, mask)
        if not self.in_replica or layer.synchronized:
            return mean, variance
        empty = tf.equal(tf.size(inputs), 0)
        return (
            tf.where(empty, tf.cast(layer.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(layer.moving_variance, variance.dtype), variance),
        )


def _sums_what_is_written(variable: Any) -> bool:
    """Returns whether a TensorFlow variable becomes the sum of the values that replicas assign or add to it."""
    is_sum = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
    return is_sum and variable.synchronization != tf.VariableSynchronization.ON_READ


def _is_moving_state(variable: Any) -> bool:
    """Returns whether replicas assign their own values: floating state of a layer that no gradient reaches."""
    in_layer = _creates_layer_state.value or getattr(variable, "_is_layer_state", False)
    floating = keras.backend.is_float_dtype(variable.dtype)
    return in_layer and floating and not variable.trainable and variable.synchronization == "auto"


class LossesOfReplicas(MutableSequence[Any]):
    """A list with separate content on each replica: a replica may pause between adding and reading a loss while another one begins.

    Outside replicas it is the list of the first replica, which has called the layer as one device would.

    Args:
        losses: The losses that the layer has added before.

    Example:
        >>> losses = LossesOfReplicas([1.0])
        >>> losses.extend([2.0, 3.0])
        >>> losses[:]
        [1.0, 2.0, 3.0]
    """

    def __init__(self, losses: Iterable[Any]) -> None:
        self._of: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
        self._of[0] = list(losses)

    def _own(self) -> list[Any]:
        context: Any = tf.distribute.get_replica_context()
        return self._of[0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))]

    def __getitem__(self, index: Any) -> Any:
        return self._own()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._own()[index]

    def __len__(self) -> int:
        return len(self._own())

    def insert(self, index: int, value: Any) -> None:
        self._own().insert(index, value)


_FUNCTIONS = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)
_MEANS = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
"""Functions that take the mean over their axis, which may be the batch."""


sees_whole_batch = Setting(False)
"""Whether the loss of the global batch is computed now."""


def mixes_rows(loss: Any, y_pred: Any) -> bool:
    """Returns whether one of Keras's losses compares the rows of a batch with each other.

    Args:
        loss: The loss.
        y_pred: Predictions, a tensor or a nest of them.
    """
    function = getattr(loss, "fn", getattr(loss, "_fn", None))
    axis = getattr(loss, "_fn_kwargs", {}).get("axis")
    if axis is None or function in _MEANS:
        return function in _FUNCTIONS
    ranks = {len(tensor.shape) for tensor in keras.tree.flatten(y_pred)} - {0}
    return any(each % rank == 0 for each in keras.tree.flatten(axis) for rank in ranks)


def loss_of_whole_batch(
    strategy: KerasStrategy, compute: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any
) -> tf.Tensor:
    """Computes a loss from the rows of all replicas.

    Args:
        strategy: The strategy in scope.
        compute: Keras's own `Loss.__call__`.
        loss: The loss.
        y_true: Targets of this replica.
        y_pred: Predictions of this replica.
        sample_weight: Weights of this replica, or None.

    Returns:
        The value of the global batch, or this replica's rows of it.
    """
    mask = masking.get_keras_mask(y_pred)
    own = {"y_true": y_true, "y_pred": y_pred, "sample_weight": sample_weight, "mask": mask}
    own = keras.tree.map_structure(lambda t: t if t is None else keras.ops.convert_to_tensor(t), own)
    rows = tf.shape(keras.tree.flatten(own["y_pred"])[0])[0]
    everyone, first = _rows_of_all(strategy, own, rows)
    if mask is not None:
        masking.set_keras_mask(everyone["y_pred"], everyone["mask"])
    with sees_whole_batch.to(True):
        value = compute(loss, everyone["y_true"], everyone["y_pred"], everyone["sample_weight"])
    if len(value.shape):
        return value[first : first + rows]
    # In a step that weights by examples, the mean over the replicas counts; otherwise their sum.
    return value if current_share() is not None else value / strategy.num_replicas_in_sync


def _rows_of_all(strategy: KerasStrategy, nest: Any, rows: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Concatenates a nest of tensors over the replicas; scalars are kept.

    Returns:
        The nest, and the index of this replica's first row in it.
    """
    context: Any = tf.distribute.get_replica_context()
    first, total = _place_in_batch(strategy, rows)
    behind = total - first - rows

    def of_all(tensor: Any) -> Any:
        if tensor is None or not len(tensor.shape):
            return tensor
        # With a sum, gradients flow back to the replica of the row.
        sent = tensor if tensor.dtype.size > 1 else tf.cast(tensor, tf.int32)
        placed = tf.pad(sent, [[first, behind]] + [[0, 0]] * (len(tensor.shape) - 1))
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, placed), tensor.dtype)

    return keras.tree.map_structure(of_all, nest), first


def _place_in_batch(strategy: KerasStrategy, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the place of this replica's rows in the global batch; called inside a replica. It uses a collective.

    Args:
        strategy: The strategy in scope.
        rows: int32 scalar, the number of rows of this replica.

    Returns:
        The index of its first row in the global batch, and the number of rows of the global batch.
    """
    replica: Any = tf.distribute.get_replica_context().replica_id_in_sync_group
    counts = strategy.extended.sum_over_replicas([tf.one_hot(replica, strategy.num_replicas_in_sync, rows)])[0]
    return tf.reduce_sum(counts[:replica]), tf.reduce_sum(counts)


class Losses(SynchronousBase):
    """Operations of losses."""

    def compute_loss(self, original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Computes one of Keras's losses that mix rows from the rows of all replicas, others from this replica's rows."""
        if self._sees_part and mixes_rows(loss, y_pred):
            return loss_of_whole_batch(self.strategy, original, loss, y_true, y_pred, sample_weight)
        return original(loss, y_true, y_pred, sample_weight)

    def apply_mask(self, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
        """Gives an unmasked entry the weight that it has in the global batch."""
        if not self._sees_part or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        total = ops.cast(ops.size(mask), dtype)
        valid = ops.sum(ops.cast(mask, dtype))
        all_total, all_valid = map(ops.stop_gradient, self.strategy.extended.sum_over_replicas([total, valid]))
        share = current_share()
        # A step weights by rows. Rows may have other lengths on each replica if each reads its own data.
        entries = all_total if share is None else share.unweighted(total)
        return original(sample_weight, mask, dtype, None) * ops.divide_no_nan(entries, all_valid)

    def reduce_loss(
        self, original: Any, values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        """Divides by the count over all replicas, where this replica's own count would be wrong."""
        share = current_share()
        if not self._sees_part or reduction in (None, "none") or not len(values.shape):
            return original(values, sample_weight, reduction)
        total = ops.sum(values)
        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        if reduction == "sum":
            return total if share is None else share.unweighted(total)
        if share is None or weighs:
            divisor = ops.sum(sample_weight) if weighs else ops.prod(ops.cast(ops.shape(values), "int32"))
            divisor = self.strategy.extended.sum_over_replicas([ops.cast(divisor, total.dtype)])[0]
            divisor = divisor if weighs else ops.stop_gradient(divisor)  # A count has no gradient.
            mean = ops.divide_no_nan(total, divisor)
            return mean if share is None else share.unweighted(mean)
        if 0 in values.shape:  # A replica without examples, which Keras would not reduce.
            return total
        return original(values, sample_weight, reduction)

    def scale_for_replicas(self, original: Any, value: Any) -> Any:
        """Scales a loss for the sum of gradients, except in a step that weights gradients, and outside replicas."""
        return original(value) if self._divides_by_replicas else value

    def unscale_for_replicas(self, original: Any, value: Any) -> Any:
        """Undoes the scaling where there was one."""
        return original(value) if self._divides_by_replicas else value

    def update_mean(self, original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        """Weights a scalar without a weight, such as a loss, by the replica's share of the batch."""
        share = current_share()
        if share is not None and not sees_whole_batch.value and not ops.shape(values):
            # The mean over no examples is NaN, which a weight of zero would not remove.
            (values,) = share.silenced([ops.cast(values, metric.dtype)])
            if sample_weight is None:
                sample_weight = share.as_weight(metric.dtype)
        return original(metric, values, sample_weight=sample_weight)

    def add_loss(self, original: Any, layer: Any, loss: Any) -> None:
        """Gives each replica its own losses."""
        several = self.in_replica and self.strategy.extended.num_local_replicas > 1
        if several and not isinstance(layer._losses, LossesOfReplicas):
            vars(layer)["_losses"] = LossesOfReplicas(layer._losses)  # Keras's `__setattr__` would make an ordinary list of it.
        original(layer, loss)

    @property
    def _sees_part(self) -> bool:
        """Whether this is one of several replicas, and the loss of its part of the batch is computed now."""
        return self.has_several and self.in_replica and not sees_whole_batch.value

    @property
    def _divides_by_replicas(self) -> bool:
        """Whether losses are divided by the number of replicas: in a custom training loop, where gradients are summed."""
        return current_share() is None and not sees_whole_batch.value and self.in_replica
