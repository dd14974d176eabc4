"""Models whose layers mix the rows of a batch: what they give out for a row depends on other rows.

A router counts the places that are left in a batch; a sum over all dimensions of a product is one of the batch. Keras's own steps
are then followed as those of users are: the replicas gather rows, and each computes what comes after for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import message, warn
from tfrep_strategy.keras_integration.protocol import Step, current_step
from tfrep_strategy.keras_integration.synchronous.batch_sums import depends_on_other_rows, follows_numbers, of_all_rows
from tfrep_strategy.keras_integration.synchronous.open_rows import (
    NobodyRepeatsError,
    TraceAgainError,
    with_open_rows,
)
from tfrep_strategy.keras_integration.synchronous.own_functions import is_of_keras
from tfrep_strategy.keras_integration.synchronous.row_reductions import all_rows
from tfrep_strategy.keras_integration.synchronous.whole_batch import place_in_batch


class LayersMixRowsError(TraceAgainError):
    """A layer was found to mix the rows of a batch, so that the step is to be followed."""


def has_own_layers(model: Any) -> bool:
    """Returns whether a model has what may mix rows: layers of the user's own, or with functions of the user's, and operations."""
    layers = model._flatten_layers()
    operations = (each for layer in layers for each in getattr(layer, "operations", ()))
    return any(not isinstance(each, keras.Layer) for each in operations) or any(map(_may_mix_rows, layers))


def _may_mix_rows(layer: Any) -> bool:
    # A model's functions are those of its loops.
    functions = () if isinstance(layer, keras.Model) else filter(callable, vars(layer).values())
    return not all(map(is_of_keras, (type(layer), *functions))) or isinstance(layer, keras.layers.Lambda) or _is_along_rows(layer)


def _is_along_rows(layer: Any) -> bool:
    return 0 in keras.tree.flatten(getattr(layer, "axis", None))


def followed_if_rows_mix(step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step of Keras's so that it is traced again, and followed, once a layer is found to mix rows."""
    mixes = False

    def step(batch: Any) -> Any:
        nonlocal mixes
        if (current := current_step()) is None:
            return step_function(batch)
        current.has_own_layers = not mixes
        if mixes:
            current.is_own = current.only_parts_are_own = True
            current.gives_means = False
        try:
            return step_function(batch)
        except LayersMixRowsError:
            mixes = True
            raise

    return step


def look_for_mixed_rows(predictions: Any) -> None:
    """Has the step traced again if the graph tells that a prediction depends on other rows than its own."""
    step = current_step()
    if step is None or not step.has_own_layers:
        return
    mixed = [each for each in keras.tree.flatten(predictions) if _are_mixed(step, each)]
    if any(all_rows(step, each) is not None for each in mixed):
        _warn_of_costs(mixed)
        raise LayersMixRowsError


def with_rows_of_all(predict_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step that predicts so that rows which depend on others are computed from those of all replicas.

    The step may not ask how many rows there are.
    """

    def step(batch: Any) -> Any:
        current = current_step()
        if current is None or tf.executing_eagerly():
            return predict_step(batch)
        current.may_take_whole_batch = True
        try:
            return repeated(current, batch)
        except NobodyRepeatsError:
            return own_of_whole_batch(current, batch)

    def own_of_whole_batch(current: Step, batch: Any) -> Any:
        outputs = predict_step(current.strategy.extended.gather_batch(batch))
        rows = tf.cast(current.rows, tf.int32)
        first, _ = place_in_batch(current.strategy, rows)
        _warn_of_costs(keras.tree.flatten(outputs))
        return keras.tree.map_structure(lambda of_all: of_all[first : first + rows], outputs)

    def repeated(current: Step, batch: Any) -> Any:
        outputs = predict_step(with_open_rows(batch))
        flat = keras.tree.flatten(outputs)
        found = {i: of_all_rows(current, each) for i, each in enumerate(flat) if _are_mixed(current, each)}
        of_all = {i: rows for i, rows in found.items() if rows is not None}
        if not of_all:
            return outputs
        _warn_of_costs([flat[i] for i in of_all])
        first, _ = place_in_batch(current.strategy, tf.shape(flat[min(of_all)])[0])
        for i, rows in of_all.items():
            flat[i] = tf.ensure_shape(rows[first : first + tf.shape(flat[i])[0]], flat[i].shape)
        return keras.tree.pack_sequence_as(outputs, flat)

    return step


def _are_mixed(step: Step, output: Any) -> bool:
    return depends_on_other_rows(step, output) and not follows_numbers(step, output)


def _warn_of_costs(outputs: list[Any]) -> None:
    warn(
        message(
            "A layer mixes the rows of a batch: what it gives out for a row depends on others. So each replica computes what comes"
            " after it for the rows of all replicas: that is right, but no faster than one device.",
            hint="mix rows as late in the model as you can. See docs/exactness.md.",
            outputs=[re.sub(r"^replica_\d+/", "", getattr(each, "name", str(each))) for each in outputs],
        ),
    )
