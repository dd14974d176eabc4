"""`optimizer.minimize`, which the optimizers of Keras 2 had."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


def minimize(self: Any, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> Any:
    """Takes the gradient of a loss and applies it, as the optimizers of Keras 2 did.

    Args:
        loss: A scalar tensor, with the `tape` that has recorded it, or a function that returns one.
        var_list: Keras variables, or a function that returns them.
        tape: A `tf.GradientTape`; needed where `loss` is a tensor.

    Raises:
        ConfigurationError: `loss` is a tensor and there is no tape.
    """
    if not callable(loss):
        if tape is None:
            raise ConfigurationError(
                message("A loss that is a tensor has no gradient of itself.", hint="pass its tape=...", loss=loss)
            )
    else:
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            loss = loss()
    variables = list(var_list() if callable(var_list) else var_list)
    with tape:  # Records the scaling too.
        scaled = self.scale_loss(loss)
    return self.apply(tape.gradient(scaled, variables), variables)
