"""FTRL in one operation where the variables are, because workers would come between several."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def apply_ftrl(optimizer: Any, gradient: Any, variables: tuple[Any, Any, Any], learning_rate: Any) -> None:
    """Moves weights and both slots at once.

    Args:
        optimizer: A `keras.optimizers.Ftrl`.
        gradient: The gradient of the weights.
        variables: The weights, the accumulator and the linear slot.
        learning_rate: Scalar.
    """
    handles = [getattr(v, "_value", v).handle for v in variables]
    dtype = variables[0].dtype
    rate = tf.cast(learning_rate, dtype)
    tf.raw_ops.ResourceApplyFtrlV2(
        var=handles[0],
        accum=handles[1],
        linear=handles[2],
        grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        lr=rate,
        l1=tf.cast(optimizer.l1_regularization_strength, dtype),
        l2=tf.cast(optimizer.l2_regularization_strength, dtype) + tf.cast(optimizer.beta, dtype) / (2.0 * rate),
        l2_shrinkage=tf.cast(optimizer.l2_shrinkage_regularization_strength, dtype),
        lr_power=tf.cast(optimizer.learning_rate_power, dtype),
        use_locking=True,
    )
