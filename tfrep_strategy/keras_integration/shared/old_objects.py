"""Optimizers and callbacks of TensorFlow 1, Keras 2 and Horovod, which Keras 3 does not understand, or takes for its own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


def refuse_old_optimizer(optimizer: Any, what: str) -> None:
    """Refuses an optimizer of TensorFlow 1, of Keras 2 or of Horovod.

    Args:
        optimizer: What was given as one: a Keras optimizer, a name, a configuration, anything.
        what: Who got it.

    Raises:
        ConfigurationError: It is of one of those.

    Example:
        >>> refuse_old_optimizer(tf.compat.v1.train.AdamOptimizer(0.01), "`compile`")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: `compile` got an optimizer of TensorFlow 1. Received: optimizer='AdamOptimizer'
        Hint: write an optimizer of keras.optimizers with the same settings: strategies sum its gradients.
    """
    origin = {"horovod": "Horovod", "tf_keras": "Keras 2"}.get(_package(optimizer))
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        origin = "TensorFlow 1"
    if origin is not None:
        hint = "write an optimizer of keras.optimizers with the same settings: strategies sum its gradients."
        raise ConfigurationError(message(f"{what} got an optimizer of {origin}.", hint=hint, optimizer=type(optimizer).__name__))


def refuse_old_callbacks(callbacks: Any) -> None:
    """Refuses callbacks of Horovod.

    Args:
        callbacks: What `fit` was given.

    Raises:
        ConfigurationError: One of them is of Horovod.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        if _package(callback) == "horovod":
            raise ConfigurationError(
                message(
                    "`fit` got a callback of Horovod, whose Keras front end does not work with Keras 3.",
                    hint="leave it out, or take the one of docs/migration/horovod.md.",
                    callback=type(callback).__name__,
                )
            )


def _package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]
