"""Keras layers on the logical devices of a replica, for models that were not written for it."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras

from tfrep_strategy.keras_integration.patching import replaces
from tfrep_strategy.keras_integration.protocol import current_strategy


def _placed(layer: Any) -> contextlib.AbstractContextManager[Any]:
    devices = getattr(current_strategy(), "logical_devices", None)
    if devices is None or not devices.layer_placement:
        return contextlib.nullcontext()
    return devices.for_layer(layer.name)


def warn_of_layers_not_seen(strategy: Any) -> None:
    """Warns, once, of names in `keras_layer_placement` that no layer has had by the end of a step."""
    devices = getattr(strategy, "logical_devices", None)
    if devices is not None and devices.layers_not_seen:
        names, devices.layers_not_seen = sorted(devices.layers_not_seen), set()
        warnings.warn(f"keras_layer_placement names layers that have not been called. Received: {names}", stacklevel=2)


@replaces(keras.layers.Layer, "__call__")
def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Puts what a layer builds and computes on its logical device."""
    with _placed(self):
        return original(self, *args, **kwargs)


@replaces(keras.layers.Layer, "add_weight")
def add_weight(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Puts the weights of a layer that is built without being called on its logical device."""
    with _placed(self):
        return original(self, *args, **kwargs)
