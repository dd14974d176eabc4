"""The functions and classes of the user that a compiled model is made with."""

from __future__ import annotations

import inspect
from typing import Any

import keras


def custom_objects_of(model: Any) -> dict[str, Any]:
    """Returns what `compile` was given and what Keras cannot find by name, so that another model can be compiled like this one.

    Args:
        model: A compiled model.

    Returns:
        Functions, and classes of objects, by the names by which Keras looks them up.
    """
    given = keras.tree.flatten(model._compile_config.config)
    found = [value if inspect.isfunction(value) else type(value) for value in given]
    return {each.__name__: each for each in found if each.__module__.partition(".")[0] not in ("keras", "builtins")}
