"""Optimizers whose update is made in one operation where the variables are, because workers would come between several."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.patching import replaces
from tfrep_strategy.keras_integration.server_state import is_on_servers


@replaces(keras.optimizers.Ftrl, "update_step")
def update_ftrl(original: Any, self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    """Moves weights and both slots at once.

    Keras reads the slots, computes, and writes them. What another worker writes in between leaves the sum of gradients and
    that of their squares of different updates, for good: the weights then run away.
    """
    index = self._get_variable_index(variable)
    accumulator, linear = self._accumulators[index], self._linears[index]
    if not (is_on_servers(accumulator) and is_on_servers(linear)):
        return original(self, gradient, variable, learning_rate)
    handles = [getattr(v, "_value", v).handle for v in (variable, accumulator, linear)]
    dtype = variable.dtype
    rate = tf.cast(learning_rate, dtype)
    tf.raw_ops.ResourceApplyFtrlV2(
        var=handles[0],
        accum=handles[1],
        linear=handles[2],
        grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        lr=rate,
        l1=tf.cast(self.l1_regularization_strength, dtype),
        l2=tf.cast(self.l2_regularization_strength, dtype) + tf.cast(self.beta, dtype) / (2.0 * rate),
        l2_shrinkage=tf.cast(self.l2_shrinkage_regularization_strength, dtype),
        lr_power=tf.cast(self.learning_rate_power, dtype),
        use_locking=True,
    )
    return None
