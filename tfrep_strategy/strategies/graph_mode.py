"""TensorFlow 1's graph mode, in which Keras 3 does not train."""

from __future__ import annotations

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


def refuse_graph_mode() -> None:
    """Refuses to make a strategy where TensorFlow does not run eagerly, before an iterator or a session fails.

    Raises:
        ConfigurationError: Eager execution is off, or a `tf.Graph` is the default.

    Example:
        >>> with tf.Graph().as_default():
        ...     refuse_graph_mode()
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: TensorFlow builds graphs for sessions here, as TensorFlow 1 did.
        Hint: leave out tf.compat.v1.disable_v2_behavior(), disable_eager_execution() and `with tf.Graph().as_default()`.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigurationError(
            message(
                "TensorFlow builds graphs for sessions here, as TensorFlow 1 did.",
                hint="leave out tf.compat.v1.disable_v2_behavior(), disable_eager_execution() and `with tf.Graph().as_default()`.",
            )
        )
