"""Keras layers on the logical devices of a replica, for models that were not written for it."""

from __future__ import annotations

import contextlib
from typing import Any

from tfrep_strategy.errors import warn
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase


class Placement(SynchronousBase):
    """Where layers are."""

    def call_layer(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Puts what a layer builds and computes on its logical device."""
        with self._placed(layer):
            return original(layer, *args, **kwargs)

    def add_weight(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Puts the weights of a layer that is built without being called on its logical device."""
        with self._placed(layer):
            return super().add_weight(original, layer, *args, **kwargs)

    @property
    def layers_not_seen(self) -> set[str]:
        """The names in `keras_layer_placement` that no layer has had, and that `warn_of_layers_not_seen` has not named."""
        return set() if self._devices is None else self._devices.layers_not_seen

    def warn_of_layers_not_seen(self) -> None:
        """Warns, once, of names in `keras_layer_placement` that no layer has had by the end of a step."""
        if self.layers_not_seen:
            names, self._devices.layers_not_seen = sorted(self.layers_not_seen), set()
            warn(f"keras_layer_placement names layers that have not been called. Received: {names}")

    @property
    def _devices(self) -> Any:
        return getattr(self.strategy.extended, "logical_devices", None)

    def _placed(self, layer: Any) -> contextlib.AbstractContextManager[Any]:
        devices = self._devices
        if devices is None or not devices.layer_placement:
            return contextlib.nullcontext()
        return devices.for_layer(layer.name)
