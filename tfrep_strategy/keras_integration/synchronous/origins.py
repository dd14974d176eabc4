"""Whose code has made an operation of a graph, as the traceback of the operation tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

_TENSORFLOW, _KERAS = os.path.dirname(tf.__file__), os.path.dirname(keras.__file__)
_PACKAGE = str(Path(__file__).parents[2])
_RAGGED = os.path.join("ops", "ragged", "")
_VECTORIZED = os.path.join("ops", "parallel_for", "")
_OF_TAPES = os.path.join("eager", "imperative_grad.py")
"""The file of TensorFlow in which a tape goes back."""


def is_of_ragged_rows(operation: Any) -> bool:
    """Returns whether TensorFlow's code of ragged tensors made an operation.

    That code works with where rows begin and end in the tensors that it was given. It compares no rows.
    """
    return _is_in(operation, _RAGGED)


def is_of_vectorized_map(operation: Any) -> bool:
    """Returns whether `tf.vectorized_map` made an operation, such as a loop where it cannot do without: a turn takes a row."""
    return _is_in(operation, _VECTORIZED)


def is_of_swish(operation: Any) -> bool:
    """Returns whether an operation is of `tf.nn.silu`, whose gradient of its own saves memory, and is what one finds without it."""
    return any(frame.name in ("silu", "swish") and frame.filename.endswith("nn_impl.py") for frame in operation.traceback)


def is_of_this_package(operation: Any) -> bool:
    """Returns whether this package has called what made an operation, as for the gradients of its collectives."""
    return _caller(operation).startswith(_PACKAGE)


def is_of_own_gradient(operation: Any) -> bool:
    """Returns whether a function of the user's, which a tape has called on its way back, made an operation."""
    if _caller(operation).startswith((_PACKAGE, _KERAS)):
        return False
    names = [frame.filename for frame in reversed(operation.traceback)]
    return any(name.endswith(_OF_TAPES) for name in names[names.index(_caller(operation)) :])


def _is_in(operation: Any, folder: str) -> bool:
    """Whether code in a folder of TensorFlow's made an operation, on behalf of whoever called TensorFlow."""
    for frame in reversed(operation.traceback):
        if folder in frame.filename:
            return True
        if not frame.filename.startswith(_TENSORFLOW):
            return False
    return False


def _caller(operation: Any) -> str:
    """Returns the file with the innermost call of TensorFlow's code; where there is none, this package's folder."""
    names = (frame.filename for frame in reversed(operation.traceback))
    return next((name for name in names if not name.startswith(_TENSORFLOW)), _PACKAGE)
