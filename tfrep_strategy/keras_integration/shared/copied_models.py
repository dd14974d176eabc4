"""A model that is made like another one: how it is compiled, and all that its layers know."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import keras


def cloned(model: Any) -> Any:
    """Makes a model with the same layers, not compiled. Keras refuses layers of a function that only this process knows."""

    def clone(layer: Any) -> Any:
        if type(layer) is not keras.layers.Lambda:
            return type(layer).from_config(layer.get_config())
        own = {"arguments": layer.arguments, "mask": layer.mask, "name": layer.name, "trainable": layer.trainable}
        return keras.layers.Lambda(layer.function, layer._output_shape, dtype=layer.dtype_policy, **own)

    is_made_of_layers = type(model).__module__.startswith("keras.") and type(model) is not keras.Model
    has_lambdas = any(type(layer) is keras.layers.Lambda for layer in model._flatten_layers())
    options = {"clone_function": clone, "recursive": True} if has_lambdas and is_made_of_layers else {}
    before, model.compiled = model.compiled, False  # Else Keras would compile the copy, too.
    try:
        return keras.models.clone_model(model, **options)
    finally:
        model.compiled = before


def compile_as(model: Any, copy: Any) -> None:
    """Compiles a model like another one, but for one step per execution. Optimizers, losses and metrics are made again.

    Args:
        model: A compiled model.
        copy: The one to compile.
    """
    if type(model).compile is keras.Model.compile and type(model).get_compile_config is keras.Model.get_compile_config:
        # Two functions may have one name, by which Keras would find them, and those without a name are not found.
        given = {name: keras.tree.map_structure(_made_again, value) for name, value in model._compile_config.config.items()}
        copy.compile(**{**given, "steps_per_execution": 1})
        copy.optimizer.build(copy.trainable_variables)
    else:
        copy.compile_from_config({**model.get_compile_config(), "steps_per_execution": 1})


def _made_again(given: Any) -> Any:
    kinds = (keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric)
    return type(given).from_config(given.get_config()) if isinstance(given, kinds) else given


def copy_state(model: Any, copy: Any) -> bool:
    """Gives a model the weights of another one of the same layers, and what preprocessing layers have learned beside weights.

    Args:
        model: The one that has them.
        copy: The one that gets them.

    Returns:
        Whether something has changed that compiled functions have taken for constant.
    """
    copy.set_weights(model.get_weights())
    known, own = map(_that_have_learned, (model, copy))
    if list(map(type, known)) != list(map(type, own)):  # Such layers are not all of a model.
        return False
    return any([_learns_from(layer, other) for layer, other in zip(own, known, strict=True)])


def _that_have_learned(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    return [each for each in layers if isinstance(each, keras.layers.Normalization) or hasattr(each, "get_vocabulary")]


def _learns_from(layer: Any, other: Any) -> bool:
    if isinstance(layer, keras.layers.Normalization):
        before = _numbers(layer)
        layer.finalize_state()  # It computes with other numbers than its weights.
        return before != _numbers(layer)
    if other.get_vocabulary() == layer.get_vocabulary():
        return False
    with tempfile.TemporaryDirectory(prefix="tfrep-vocabulary-") as folder:
        other.save_assets(folder)
        if os.listdir(folder):  # Else the vocabulary is part of the config.
            layer.load_assets(folder)
    return True


def _numbers(layer: Any) -> list[Any]:
    found = (getattr(layer, name, None) for name in ("mean", "variance"))
    return [None if each is None else keras.ops.convert_to_numpy(each).tolist() for each in found]
