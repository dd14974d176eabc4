"""What callbacks remember between epochs, so that those of a run that is started again go on where the others were."""

from __future__ import annotations

import copy
import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

ORBAX = (keras.callbacks.OrbaxCheckpoint,) if hasattr(keras.callbacks, "OrbaxCheckpoint") else ()
"""Keras has it since 3.14."""

CHECKPOINTS: tuple[Any, ...] = (keras.callbacks.ModelCheckpoint, *ORBAX)

OF_KERAS = (
    *CHECKPOINTS,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
"""Those of Keras's callbacks whose decisions depend on what they remember. What others remember belongs to the process."""

_GROUP = "tfrep_run"
_ARRAY = "numpy array"


def states_of(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Collects what callbacks remember: their attributes that are numbers, texts, arrays, and lists and dictionaries of these.

    Args:
        callbacks: Those of a `fit`.

    Returns:
        The attributes, by the class of the callback, and its number among those of that class.
    """
    return {
        name: {key: value for key, value in vars(callback).items() if _is_state(callback, key) and _is_plain(value)}
        for name, callback in _named(callbacks)
    }


def restore_states(callbacks: Sequence[Any], states: dict[str, dict[str, Any]]) -> None:
    """Gives callbacks what others of the same classes remembered.

    Args:
        callbacks: Those of a `fit`.
        states: What `states_of` has returned.
    """
    for name, callback in _named(callbacks):
        for key, value in states.get(name, {}).items():
            if key in vars(callback):
                setattr(callback, key, copy.deepcopy(value))


def write_beside_weights(weights: io.BytesIO, content: dict[str, Any]) -> None:
    """Adds plain data to a file of weights, which Keras reads as before.

    Args:
        weights: The content of a file in Keras's HDF5 format.
        content: Numbers, texts, arrays, and lists and dictionaries of these.
    """
    arrays: list[np.ndarray] = []

    def number_of(array: Any) -> dict[str, int]:
        arrays.append(np.asarray(array))
        return {_ARRAY: len(arrays) - 1}

    text = json.dumps(content, default=number_of)
    with h5py.File(weights, "a") as file:
        group = file.create_group(_GROUP)
        group["content"] = text
        for i, array in enumerate(arrays):
            group[str(i)] = array
            group[str(i)].attrs["dtype"] = array.dtype.name


def read_beside_weights(path: str) -> dict[str, Any] | None:
    """Reads what `write_beside_weights` has written; None where there is nothing.

    Args:
        path: Of the file.
    """
    with h5py.File(path, "r") as file:
        if _GROUP not in file:
            return None
        group = file[_GROUP]

        def array_of(found: dict[str, Any]) -> Any:
            if list(found) != [_ARRAY]:
                return found
            data = group[str(found[_ARRAY])]
            array = data[()]
            # HDF5 has no bfloat16 and float8, and keeps their bytes.
            if data.dtype.kind == "V" and data.dtype.names is None and "dtype" in data.attrs:
                array = array.view(tf.as_dtype(data.attrs["dtype"]).as_numpy_dtype)
            return array

        return json.loads(group["content"].asstr()[()], object_hook=array_of)


def _named(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns the callbacks that remember something, each with a name that it has in every start of the program."""
    seen: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        kind = type(callback)
        name = f"{kind.__module__}.{kind.__qualname__}"
        seen[name] += 1
        first_of_keras = next(base for base in kind.__mro__ if base.__module__.startswith("keras."))
        if first_of_keras in (keras.callbacks.Callback, *OF_KERAS):
            named.append((f"{name} {seen[name]}", callback))
    return named


def _is_state(callback: Any, key: str) -> bool:
    # Those of Keras that compare change the sign of `min_delta` in their first epoch, and would do so again.
    return key not in ("params", "_params") and not (key == "min_delta" and hasattr(callback, "monitor_op"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, np.generic, np.ndarray))
