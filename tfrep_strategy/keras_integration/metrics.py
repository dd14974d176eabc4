"""Metrics that count a value which is one number per batch as one device would."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.patching import replaces
from tfrep_strategy.keras_integration.protocol import current_step


@replaces(keras.metrics.Mean, "update_state")
def update_state(original: Any, self: Any, values: Any, sample_weight: Any = None) -> Any:
    """Weighs a scalar without a weight, such as the loss of a custom step, by the replica's share of the batch."""
    step = current_step()
    if step is not None and not keras.ops.shape(values):
        # The mean over no examples is no number, which a weight of zero would not remove.
        values = tf.where(step.num_examples > 0, values, tf.zeros_like(values))
        if sample_weight is None:
            sample_weight = keras.ops.cast(step.share, self.dtype)
    return original(self, values, sample_weight=sample_weight)
