"""Batch normalization with the statistics of each replica's own rows: `batch_statistics="replica"`.

No replica waits for another one in a layer. The answer is no longer that of one device: it depends on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase


class _Statistics(NamedTuple):
    """What a replica finds in its own rows. All have the axes of the rows, of which those that are reduced are 1."""

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


_statistics: Setting[_Statistics | None] = Setting(None)
"""Of the layer that is called now."""


class OwnStatistics(SynchronousBase):
    """What batch normalization does in the trace of a step."""

    def normalize(self, original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalizes the rows of each replica by its own mean and variance, where the strategy says so."""
        is_own = self.strategy.batch_statistics == "replica" and not layer.synchronized and not getattr(layer, "renorm", False)
        if not is_own or not training or not layer.trainable:
            return original(layer, inputs, training=training, mask=mask)
        dtype = tf.as_dtype(inputs.dtype)
        rows = tf.cast(inputs, tf.float32) if dtype.size < 4 else inputs
        replicas: Any = self.strategy.extended
        own = _found(replicas, rows, mask, layer._reduction_axes)
        with _statistics.to(own):
            original(layer, inputs, training=training, mask=mask)  # It moves the statistics. What it returns is not used.
        for moved in (layer.moving_mean, layer.moving_variance):
            moved.value.differs = True
        shape = own.mean.shape

        def of_layer(variable: Any) -> tf.Tensor:
            return tf.reshape(tf.cast(variable, rows.dtype), shape)

        outputs = tf.nn.batch_normalization(
            rows,
            replicas.spread(own.mean, rows),
            replicas.spread(own.variance, rows),
            of_layer(layer.beta) if layer.center else None,
            of_layer(layer.gamma) if layer.scale else None,
            layer.epsilon,
        )
        return tf.cast(outputs, layer.compute_dtype)

    def moments(self, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        """Gives the moving statistics of a replica its own mean and variance. No rows change none."""
        own = _statistics.value
        if own is None:
            return original(layer, inputs, mask)
        there = tf.reshape(own.count, []) > 0
        return tuple(
            tf.where(there, tf.reshape(new, [-1]), tf.cast(old, new.dtype))
            for new, old in ((own.mean, layer.moving_mean), (own.variance, layer.moving_variance))
        )


def _found(replicas: Any, rows: tf.Tensor, mask: Any, axes: Sequence[int]) -> _Statistics:
    kept = tf.ones_like(rows[..., :1], tf.bool) if mask is None else tf.cast(mask, tf.bool)[..., tf.newaxis]
    count = tf.stop_gradient(replicas.own_sum(tf.cast(kept, rows.dtype), list(range(rows.shape.rank))))
    if rows.shape.rank - 1 in axes:  # The channels are on another axis, of which each entry was counted.
        (channels,) = set(range(rows.shape.rank)) - set(axes)
        count *= tf.cast(tf.shape(rows)[-1], rows.dtype) / tf.cast(tf.shape(rows)[channels], rows.dtype)

    def of_kept(values: tf.Tensor) -> tf.Tensor:
        kept_only = values if mask is None else tf.where(kept, values, tf.zeros_like(values))
        return tf.math.divide_no_nan(replicas.own_sum(kept_only, axes), count)

    mean = of_kept(rows)
    return _Statistics(count, mean, of_kept(tf.square(rows - replicas.spread(mean, rows))))
