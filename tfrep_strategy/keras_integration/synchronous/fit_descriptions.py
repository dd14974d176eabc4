"""Descriptions of a `fit`, to find the one that a backup belongs to. They are equal when the script is started again.

The number of a `fit` is not enough: a script may skip work that is done already. A description has settings, which must be
equal, and samples of the data and of the initial weights. Rank 0 makes and compares descriptions.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.data.agreement import Fingerprint, Leaf
from tfrep_strategy.keras_integration.internals import get_random_seed

_STEER = (keras.callbacks.EarlyStopping, keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
"""Keras's callbacks whose arguments change the training. Others have paths, which may contain the time."""

_DATA = ("x", "y", "sample_weight")
_WITHOUT_EFFECT = ("self", "callbacks", "validation_data", "verbose")
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
_DATA_NAME, _WEIGHTS_NAME = "data", "initial weights"

_PRECISION = 1e-5
"""Another machine may round data and initial weights differently."""


def description(number: int, model: Any, given: Mapping[str, Any], steps: int | None, callbacks: Sequence[Any]) -> dict[str, Any]:
    """Describes a `fit` that begins.

    Args:
        number: Number of `fit`s that the script has called before.
        model: Its model.
        given: The arguments of `fit`, by name.
        steps: Number of steps of an epoch, if known.
        callbacks: The callbacks of the program.

    Returns:
        Plain data that JSON can hold.
    """
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    arguments = {name: value for name, value in given.items() if name not in (*_DATA, *_WITHOUT_EFFECT)}
    settings = {
        "model": [
            [_plain(layer) for layer in model._flatten_layers()],
            [[list(v.shape), str(v.dtype), v.trainable] for v in model.weights],
        ],
        "optimizer": _plain(model.optimizer),
        "loss or metrics": {name: _plain(compiled.get(name)) for name in _COMPILED},
        "callbacks": [_steering(callback) for callback in callbacks if isinstance(callback, _STEER)],
        "arguments of fit": _plain(arguments | {"steps": steps}),
        "seed": get_random_seed(),
    }
    return {
        "number": number,
        "is_seeded": settings["seed"] is not None,
        "settings": {name: _digest(value) for name, value in settings.items()},
        "samples": {
            _DATA_NAME: _samples({name: given.get(name) for name in _DATA}),
            _WEIGHTS_NAME: _samples({"weights": [tf.convert_to_tensor(v.value) for v in model.weights]}),
        },
    }


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two `fit`s, relevant or not.

    Args:
        own: From `description`.
        other: The description of another process.
    """
    settings = [name for name, value in own["settings"].items() if other["settings"].get(name) != value]
    return settings + [name for name, value in own["samples"].items() if not _are_alike(value, other["samples"].get(name))]


def is_backup_of(own: Mapping[str, Any], other: Mapping[str, Any], is_finished: bool) -> bool:
    """Returns whether a `fit` may resume from a backup.

    Without a seed, a restarted script has other initial weights, and perhaps other data. These differences are then ignored,
    except that a finished `fit` must have the same data.

    Args:
        own: From `description`.
        other: The description in the backup.
        is_finished: Whether the `fit` of the backup has finished.
    """
    by_chance = set[str]()
    if not own["is_seeded"]:
        is_same_call = own["number"] == other["number"] and not is_finished
        by_chance = {_WEIGHTS_NAME, _DATA_NAME} if is_same_call else {_WEIGHTS_NAME}
    return not set(differences(own, other)) - by_chance


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Returns a setting in a form that JSON can hold; for an object, its class and config."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return re.sub(r"_\d+$", "", value)  # Keras numbers names by the objects that the process has made.
    if isinstance(value, np.generic):
        return value.item() if isinstance(value, np.number) else str(value)
    if isinstance(value, np.ndarray) or tf.is_tensor(value):
        return _samples({"": value})
    if isinstance(value, Mapping):
        is_lambda = value.get("class_name") == "__lambda__"  # Its serialized code may differ between processes.
        # Layers without a seed may draw one.
        return "lambda" if is_lambda else {str(key): _plain(value[key]) for key in value if key != "seed"}
    if isinstance(value, Sequence):
        return [_plain(each) for each in value]
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    return [_name(value), _config(value)]


def _config(value: Any) -> Any:
    try:
        return None if isinstance(value, type) else _plain(value.get_config())
    except Exception:  # There is no config, as for most subclassed models, or it needs something that is missing.
        return None


def _of_function(function: types.FunctionType) -> list[Any]:
    """Returns the name of a function, and the numbers and texts that it uses."""
    values = [*function.__code__.co_consts, *(function.__defaults__ or ()), *map(_content, function.__closure__ or ())]
    return [_name(function), [value for value in values if isinstance(value, (bool, int, float, str))]]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The cell is empty.
        return None


def _steering(callback: Any) -> list[Any]:
    """Returns a callback's class, and those of its arguments that it stores."""
    names = inspect.signature(type(callback)).parameters
    kept = {name: _plain(value) for name, value in vars(callback).items() if name in names}
    if "min_delta" in kept:
        kept["min_delta"] = abs(kept["min_delta"])  # Keras changes its sign in the first epoch.
    return [_name(callback), kept]


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _samples(given: Mapping[str, Any]) -> list[list[Any]]:
    return [_sample(leaf) for leaf in Fingerprint(given).leaves]


def _sample(leaf: Leaf) -> list[Any]:
    """Returns a kind that is equal for equal arrays, a sum that is nearly equal, and the sum of absolute values."""
    kind = f"{leaf.name}: {leaf.kind}"
    if isinstance(leaf.sample, np.ndarray) and leaf.sample.dtype.kind == "f":
        values = np.nan_to_num(leaf.sample.astype(np.float64).ravel(), posinf=0.0, neginf=0.0)
        weighted = values * (1 + np.cos(np.arange(len(values))) / 2)  # Makes the sum depend on the order of the rows.
        return [kind, float(weighted.sum()), float(np.abs(weighted).sum())]
    digest = hashlib.blake2b(digest_size=16)
    leaf.update(digest)
    return [f"{kind} {digest.hexdigest()}", 0.0, 0.0]


def _are_alike(own: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]] | None) -> bool:
    return (
        other is not None
        and [kind for kind, _, _ in own] == [kind for kind, _, _ in other]
        and all(abs(a - b) <= _PRECISION * size for (_, a, size), (_, b, _) in zip(own, other, strict=True))
    )
