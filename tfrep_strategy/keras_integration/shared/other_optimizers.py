"""Optimizers that a model has beside the one it was compiled with, such as those of a GAN.

Their slots belong to a backup. Keras makes them in the first step, which is too late: a file is read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

Places = dict[str, list[int]]
"""For each optimizer, by where the model holds it, the numbers of the weights that it updates."""


def other_optimizers(model: Any) -> dict[str, Any]:
    """Returns the optimizers by where the model holds them."""
    found: dict[str, Any] = {}
    seen = {id(model.optimizer)}
    for number, layer in enumerate(model._flatten_layers()):
        for name, value in vars(layer).items():
            for place, optimizer in _optimizers_in(value):
                if id(optimizer) not in seen:
                    seen.add(id(optimizer))
                    found[f"{number}.{name}{place}"] = optimizer
    return found


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer of Keras, and those inside it (`LossScaleOptimizer`, `MultiOptimizer`)."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        yield optimizer
        for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
            yield from with_inner(inner)


def places_of(model: Any) -> Places:
    """Describes those that are built, in what JSON can hold."""
    numbers = {id(weight): number for number, weight in enumerate(model.weights)}
    built = {place: each for place, each in other_optimizers(model).items() if each.built}
    updated = {place: [numbers.get(id(weight)) for weight in _updated(each)] for place, each in built.items()}
    return {place: found for place, found in updated.items() if None not in found}  # type: ignore[misc]


def build_others(model: Any, places: Places) -> None:
    """Builds those that are not built, in the scope of their strategy, as they were when they were described."""
    weights = model.weights
    for place, optimizer in other_optimizers(model).items():
        numbers = places.get(place, [])
        if numbers and not optimizer.built and max(numbers) < len(weights):
            optimizer.build([weights[number] for number in numbers])


def _updated(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def _optimizers_in(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _optimizers_in(each, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _optimizers_in(each, f"{place}.{number}")
