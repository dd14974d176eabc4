"""Convolutions of no rows: the part of a replica whose batch has fewer rows than there are replicas.

TensorFlow's oneDNN kernels (2.21, on the CPU) give such a batch the shape of their input, or no gradient at all.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import replica_strategy

_nn = keras_internal("backend.tensorflow.nn")


def _convolve(original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Convolves a row of zeros where there is none, and takes its result away.

    Where there are rows, padding by nothing and slicing off nothing copy nothing, forward and backward.
    """
    strategy = replica_strategy()
    inputs = tf.convert_to_tensor(inputs)
    if strategy is None or strategy.num_replicas_in_sync == 1 or inputs.shape[0] or "GPU" in inputs.device:
        return original(inputs, *args, **kwargs)
    rows = tf.shape(inputs)[0]
    missing = 1 - tf.minimum(rows, 1)
    padded = tf.pad(inputs, tf.concat([[[0, missing]], tf.zeros([inputs.shape.rank - 1, 2], tf.int32)], 0))
    outputs = original(tf.ensure_shape(padded, [None, *inputs.shape[1:]]), *args, **kwargs)
    sizes = tf.concat([[rows], tf.shape(outputs)[1:]], 0)
    return tf.ensure_shape(tf.slice(outputs, tf.zeros_like(sizes), sizes), [inputs.shape[0], *outputs.shape[1:]])


for _name in ("conv", "conv_transpose", "depthwise_conv", "separable_conv"):
    replaces(_nn, _name)(_convolve)
