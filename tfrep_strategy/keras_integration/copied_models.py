"""A copy of a model: its compilation, the state of its layers, and the user's functions and classes in its `compile`."""

from __future__ import annotations

import inspect
import os
import tempfile
from typing import Any

import keras


def cloned(model: Any) -> Any:
    """Makes a model with the same layers, not compiled. Keras refuses layers with functions that only this process knows."""

    def clone(layer: Any) -> Any:
        if type(layer) is not keras.layers.Lambda:
            return type(layer).from_config(layer.get_config())
        own = {"arguments": layer.arguments, "mask": layer.mask, "name": layer.name, "trainable": layer.trainable}
        return keras.layers.Lambda(layer.function, layer._output_shape, dtype=layer.dtype_policy, **own)

    is_made_of_layers = type(model).__module__.startswith("keras.") and type(model) is not keras.Model
    has_lambdas = any(type(layer) is keras.layers.Lambda for layer in model._flatten_layers())
    options = {"clone_function": clone, "recursive": True} if has_lambdas and is_made_of_layers else {}
    before, model.compiled = model.compiled, False  # Otherwise Keras would compile the copy as well.
    try:
        return keras.models.clone_model(model, **options)
    finally:
        model.compiled = before


def compile_as(model: Any, copy: Any) -> None:
    """Compiles a model like another one, but with one step per execution. Optimizers, losses and metrics are new.

    Args:
        model: A compiled model.
        copy: The one to compile.
    """
    if type(model).compile is keras.Model.compile and type(model).get_compile_config is keras.Model.get_compile_config:
        # Keras finds functions by name: two may share a name, and lambdas have none.
        given = {name: keras.tree.map_structure(_made_again, value) for name, value in model._compile_config.config.items()}
        copy.compile(**{**given, "steps_per_execution": 1})
        if copy.optimizer is not None:
            copy.optimizer.build(copy.trainable_variables)
    else:
        copy.compile_from_config({**model.get_compile_config(), "steps_per_execution": 1})


def _made_again(given: Any) -> Any:
    kinds = (keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric)
    return type(given).from_config(given.get_config()) if isinstance(given, kinds) else given


def copy_state(model: Any, copy: Any) -> bool:
    """Copies weights, and the state of preprocessing layers that is not in weights, to a model of the same layers.

    Args:
        model: The source.
        copy: The target.

    Returns:
        Whether there are preprocessing layers. Compiled functions hold their former state as constants.
    """
    copy.set_weights(model.get_weights())
    known, own = ([layer for layer in each._flatten_layers() if hasattr(layer, "adapt")] for each in (model, copy))
    if list(map(type, known)) != list(map(type, own)):  # One of the models leaves preprocessing to its data.
        return False
    for layer, other in zip(own, known, strict=True):
        _learn_from(layer, other)
    return bool(own)


def _learn_from(layer: Any, other: Any) -> None:
    """Copies the state of one layer, as Keras does when it loads a model."""
    store: dict[str, Any] = {}
    other.save_own_variables(store)
    layer.load_own_variables(store)
    if not hasattr(layer, "get_vocabulary") or layer.get_vocabulary() == other.get_vocabulary():
        return
    with tempfile.TemporaryDirectory(prefix="tfrep-vocabulary-") as folder:
        other.save_assets(folder)
        if os.listdir(folder):  # Otherwise the vocabulary is part of the config.
            layer.load_assets(folder)


def custom_objects_of(model: Any) -> dict[str, Any]:
    """Returns the functions and classes that `compile` got and Keras cannot find by name, to compile another model alike.

    Args:
        model: A compiled model.

    Returns:
        Functions, and classes of objects, by the names by which Keras looks them up.
    """
    given = keras.tree.flatten(model._compile_config.config)
    found = [value if inspect.isfunction(value) else type(value) for value in given]
    return {each.__name__: each for each in found if each.__module__.partition(".")[0] not in ("keras", "builtins")}
