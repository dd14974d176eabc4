"""A callback of this package that says of itself what Keras and the strategies cannot see."""

from __future__ import annotations

import keras


class DeclaredCallback(keras.callbacks.Callback):
    """Base of callbacks that declare what they need.

    Attributes:
        looks_at_batches: Whether it needs the logs of each batch, or may stop at one. If it does not, a step costs nothing more.
        saves_training: Whether it saves the training itself, so that a run need not back it up.
    """

    looks_at_batches = True
    saves_training = False
