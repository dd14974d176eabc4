"""Optimizers and callbacks of TensorFlow 1, Keras 2 and Horovod, which Keras 3 does not understand, or takes for its own."""

from __future__ import annotations

import inspect
from numbers import Real
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.old_spellings import OF_CALLBACKS

_OF_TENSORFLOW_1 = {
    "GradientDescentOptimizer": ("SGD", {"learning_rate": "_learning_rate"}),
    "MomentumOptimizer": (
        "SGD", {"learning_rate": "_learning_rate", "momentum": "_momentum", "nesterov": "_use_nesterov"},
    ),
    "AdamOptimizer": (
        "Adam", {"learning_rate": "_lr", "beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"},
    ),
    "RMSPropOptimizer": (
        "RMSprop", {"learning_rate": "_learning_rate", "rho": "_decay", "momentum": "_momentum", "epsilon": "_epsilon"},
    ),
    "AdagradOptimizer": (
        "Adagrad",
        {"learning_rate": "_learning_rate", "initial_accumulator_value": "_initial_accumulator_value"},
    ),
    "AdadeltaOptimizer": ("Adadelta", {"learning_rate": "_lr", "rho": "_rho", "epsilon": "_epsilon"}),
    "FtrlOptimizer": ("Ftrl", {"learning_rate": "_learning_rate"}),
}  # fmt: skip
"""Of each class: the one of Keras that does the same, and where it keeps the values of Keras's arguments."""


def refuse_old_optimizer(optimizer: Any, what: str) -> None:
    """Refuses an optimizer of TensorFlow 1, of Keras 2 or of Horovod, and shows the line to write.

    Args:
        optimizer: What was given as one: a Keras optimizer, a name, a configuration, anything.
        what: Who got it.

    Raises:
        ConfigurationError: It is of one of those.

    Example:
        >>> refuse_old_optimizer(tf.compat.v1.train.AdamOptimizer(0.01), "`compile`")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: `compile` got an optimizer of TensorFlow 1. Received: optimizer=AdamOptimizer
        Hint: write keras.optimizers.Adam(learning_rate=0.01, epsilon=1e-08).
    """
    origin = _origin(optimizer)
    if origin is not None:
        shown = _Shown(type(optimizer).__name__)
        raise ConfigurationError(
            message(f"{what} got an optimizer of {origin}.", hint=_line(optimizer), optimizer=shown)
        )


def refuse_old_callbacks(callbacks: Any) -> None:
    """Refuses callbacks of Horovod, and says what to write.

    Args:
        callbacks: What `fit` was given.

    Raises:
        ConfigurationError: One of them is of Horovod.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        name = type(callback).__name__
        if type(callback).__module__.partition(".")[0] == "horovod":
            raise ConfigurationError(
                message(
                    "`fit` got a callback of Horovod, whose Keras front end does not work with Keras 3.",
                    hint=OF_CALLBACKS.get(name, "leave it out."),
                    callback=_Shown(name),
                )
            )


class _Shown(str):
    """A name that a message shows without quotes."""

    __repr__ = str.__str__


def _origin(optimizer: Any) -> str | None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return "TensorFlow 1"
    package = type(optimizer).__module__.partition(".")[0]
    return {"horovod": "Horovod", "tf_keras": "Keras 2"}.get(package)


def _line(optimizer: Any) -> str:
    """Returns the hint: a line that makes Keras 3's optimizer with the same settings."""
    name, values = type(optimizer).__name__, {}
    if name in _OF_TENSORFLOW_1:
        name, attributes = _OF_TENSORFLOW_1[name]
        values = {argument: getattr(optimizer, attribute, None) for argument, attribute in attributes.items()}
    elif hasattr(optimizer, "get_config"):
        values = optimizer.get_config()
    kind = getattr(keras.optimizers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, keras.optimizers.Optimizer):
        return "write an optimizer of keras.optimizers: strategies sum its gradients."
    settings = {
        argument: values[argument]
        for argument, parameter in inspect.signature(kind).parameters.items()
        if argument == "learning_rate" or isinstance(values.get(argument), Real) and values[argument] != parameter.default
    }
    return f"write keras.optimizers.{name}({', '.join(f'{key}={_written(value)}' for key, value in settings.items())})."


def _written(value: Any) -> str:
    """Returns a setting as a program would write it. A learning rate may be a function or a tensor of TensorFlow 1."""
    if isinstance(value, bool):
        return str(value)
    return f"{value:.6g}" if isinstance(value, Real) else "..."
