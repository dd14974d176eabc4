"""Losses that compare the rows of a batch with each other: they see the rows of all replicas.

Their value on a part of a batch says nothing about their value on the whole, so that no weighing could make it right.
Every replica computes the loss of the global batch instead, from rows that were gathered with their gradients.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.internals import masking
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_share
from tfrep_strategy.keras_integration.settings import Setting

_FUNCTIONS = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)
_MEANS = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
"""Functions that take the mean over their axis, which may be the batch."""


sees_whole_batch = Setting(False)
"""Whether the loss that is computed now is that of the global batch."""


def mixes_rows(loss: Any, y_pred: Any) -> bool:
    """Whether one of Keras's losses compares the rows of a batch with each other.

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
    # In a step that weighs by examples, the mean over the replicas counts; in another one their sum.
    return value if current_share() is not None else value / strategy.num_replicas_in_sync


def _rows_of_all(strategy: KerasStrategy, nest: Any, rows: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Concatenates a nest of tensors over the replicas; scalars are kept.

    Returns:
        The nest, and where this replica's rows begin in it.
    """
    context: Any = tf.distribute.get_replica_context()
    first, total = _place_in_batch(strategy, rows)
    behind = total - first - rows

    def of_all(tensor: Any) -> Any:
        if tensor is None or not len(tensor.shape):
            return tensor
        # A sum, through which gradients find back to the replica that they belong to.
        sent = tensor if tensor.dtype.size > 1 else tf.cast(tensor, tf.int32)
        placed = tf.pad(sent, [[first, behind]] + [[0, 0]] * (len(tensor.shape) - 1))
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, placed), tensor.dtype)

    return keras.tree.map_structure(of_all, nest), first


def _place_in_batch(strategy: KerasStrategy, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Asks all replicas how many rows they have; called inside a replica.

    Args:
        strategy: The strategy in scope.
        rows: int32 scalar, the rows of this replica.

    Returns:
        Where its rows begin in the global batch, and how many rows that has.
    """
    replica: Any = tf.distribute.get_replica_context().replica_id_in_sync_group
    counts = strategy.extended.sum_over_replicas([tf.one_hot(replica, strategy.num_replicas_in_sync, rows)])[0]
    return tf.reduce_sum(counts[:replica]), tf.reduce_sum(counts)
