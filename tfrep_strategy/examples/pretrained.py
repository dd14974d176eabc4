"""Models of `keras.applications` with trained weights, or an error that says why there are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfrep_strategy.errors import ConfigurationError, message


def load_pretrained(
    application: Callable[..., keras.Model], weights: str | os.PathLike[str] = "imagenet", **arguments: Any
) -> keras.Model:
    """Builds a model of `keras.applications` with trained weights.

    Args:
        application: A function such as `keras.applications.VGG16`.
        weights: `"imagenet"`, which Keras fetches, or the path of a file of weights.
        **arguments: What else the function takes, such as `include_top` and `input_shape`.

    Returns:
        The model.

    Raises:
        ConfigurationError: The weights cannot be fetched, there is no such file, or it does not fit the model.

    Example:
        >>> load_pretrained(keras.applications.VGG16, "no such file.weights.h5")
        Traceback (most recent call last):
            ...
        tfrep_strategy.errors.ConfigurationError: There is no such file of weights. Received: weights='no such file.weights.h5'
        Hint: pass the path of a file, or "imagenet".
    """
    name = os.fspath(weights)
    if name == "imagenet":
        try:
            return application(weights=name, **arguments)
        except Exception as error:  # Keras raises a bare Exception where it cannot fetch a file.
            if "URL fetch failure" not in str(error):
                raise
            hint = "fetch them where there is a network, and pass the path of the file."
            raise ConfigurationError(message("The weights cannot be fetched.", hint=hint, weights=name)) from error
    if not Path(name).is_file():
        hint = 'pass the path of a file, or "imagenet".'
        raise ConfigurationError(message("There is no such file of weights.", hint=hint, weights=name))
    try:
        return application(weights=name, **arguments)
    except (ValueError, OSError) as error:
        hint = "use the file of the same application, with the same include_top."
        raise ConfigurationError(message("The weights do not fit the model.", hint=hint, weights=name)) from error
