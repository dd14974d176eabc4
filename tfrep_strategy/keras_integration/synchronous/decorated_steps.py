"""Steps of the user's own under `@tf.function`.

Keras traces a step in any case. A function inside it has a graph of its own, where nobody can follow which tensors are results of
metrics or sums over rows, and where a tape cannot tell the gradient of the global batch.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import tensorflow as tf


def undecorated(model: Any, name: str, step_function: Any) -> Any:
    """Returns what a step function was before it became a `tf.function`, converted as that converts it.

    Args:
        model: The model.
        name: The name of its step function, "train_step" or "test_step".
        step_function: The step function, bound to the model.

    Returns:
        A function of a batch; `step_function` if it is no `tf.function`.
    """
    attribute = inspect.getattr_static(model, name)
    if not isinstance(attribute, tf.types.experimental.GenericFunction):
        return step_function
    inner: Any = attribute.python_function  # type: ignore[attr-defined]
    bound = inner if name in vars(model) else types.MethodType(inner, model)
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(bound, autograph.control_status_ctx())
