"""State of a model that its files of weights are without, and that training goes on from.

These are the generators of layers that draw random numbers, Keras's own generator, and what recurrent layers with `stateful=True`
keep from batch to batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfrep_strategy.keras_integration.internals import get_global_attribute, global_seed_generator

_SEEDS, _OWN_SEED, _RECURRENT = "seeds", "seed of Keras", "recurrent states"


def values_beside_files(model: Any) -> dict[str, list[np.ndarray]]:
    """Reads the state, where sums over replicas can be read.

    Args:
        model: The model.

    Returns:
        The values by kind.
    """
    return {kind: list(map(keras.ops.convert_to_numpy, variables)) for kind, variables in _variables(model).items()}


def assign_beside_files(model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Gives the model the state. Every process calls it, with equal values, in the scope of the model's strategy.

    Args:
        model: The model, which is built.
        values: From `values_beside_files`.
    """
    if values[_OWN_SEED]:
        global_seed_generator()  # Makes it, where nothing has drawn from it yet.
    for kind in values:
        _assign(kind, model, values)


def assign_recurrent_states(model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Gives recurrent layers the state. Every process calls it, with equal values.

    Args:
        model: The model, which is built.
        values: From `values_beside_files`.
    """
    _assign(_RECURRENT, model, values)


def _assign(kind: str, model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    for variable, value in zip(_variables(model)[kind], values[kind], strict=False):  # A layer may make its own later.
        variable.assign(value)


def _variables(model: Any) -> dict[str, list[Any]]:
    in_files = {id(variable) for variable in model.weights + model.metrics_variables}
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    generator = get_global_attribute("global_seed_generator")
    return {
        _SEEDS: [variable for variable in model.variables if id(variable) not in in_files],
        _OWN_SEED: [] if generator is None else [generator.state],
        _RECURRENT: [state for layer in layers for state in keras.tree.flatten(getattr(layer, "states", None) or [])],
    }
