"""Functions (`tf.function`) that a step calls which Keras drives: they become part of the step.

Keras traces the step in any case. A function inside it would have a graph of its own, where nobody can follow which tensors are
sums over rows or compare them, and where a tape cannot tell the gradient of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import TracedFunction, as_traced
from tfrep_strategy.keras_integration.protocol import Step, current_step

_LIBRARIES = ("tensorflow.", "tfrep_strategy.")
_call = TracedFunction.__call__
_lock, _steps = threading.Lock(), 0
"""How many steps are being traced. No function of TensorFlow costs more where there is none."""


@contextlib.contextmanager
def as_parts_of_steps() -> Iterator[None]:
    """Makes functions that the steps in the block call part of these steps."""
    global _steps
    with _lock:
        _steps += 1
        TracedFunction.__call__ = _call_within_step
    try:
        yield
    finally:
        with _lock:
            _steps -= 1
            if not _steps:
                TracedFunction.__call__ = _call


@functools.wraps(_call)
def _call_within_step(function: Any, *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    if step is None or not _can_be_part(step, function):
        return _call(function, *args, **kwargs)
    args, kwargs = tf.nest.map_structure(_as_given, (args, kwargs))
    return tf.nest.map_structure(_as_returned, as_traced(function)(*args, **kwargs))


def _can_be_part(step: Step, function: Any) -> bool:
    """Whether a function is the user's own, of a model, say, is called in the graph of the step, and asks only to be traced."""
    if tf.executing_eagerly() or step.is_in_branch or str(function.python_function.__module__).startswith(_LIBRARIES):
        return False
    return not (function._jit_compile or function._attributes or function.input_signature)


def _as_given(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _as_returned(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, (bool, float, int, str, np.ndarray, np.generic)) else value
