"""Model parallelism: each replica has several logical devices, numbered 0, 1, ...

They change the placement only. The answer is the same as on one device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, is_count, message
from tfrep_strategy.strategies.one_device import traced_for


class LogicalDevices:
    """The devices of each replica of a strategy.

    Args:
        devices: All devices. The first `devices_per_replica` belong to replica 0, and so on.
        devices_per_replica: Number of devices of a replica.
        layer_placement: The logical device of Keras layers, by name. Layers inside a named layer are placed with it.

    Raises:
        ConfigurationError: The number of devices is not a multiple of `devices_per_replica`, or a layer is placed on a
            device that a replica does not have.

    Example:
        >>> LogicalDevices(["CPU:0", "CPU:1", "CPU:2", "CPU:3"], 2, {}).of_replica
        [['CPU:0', 'CPU:1'], ['CPU:2', 'CPU:3']]
    """

    def __init__(self, devices: Sequence[str], devices_per_replica: int, layer_placement: Mapping[str, int]) -> None:
        if devices_per_replica < 1 or len(devices) % devices_per_replica:
            raise ConfigurationError(
                message(
                    "The number of devices is not a multiple of devices_per_replica.",
                    hint="pass devices_per_replica devices for each replica.",
                    devices=list(devices),
                    devices_per_replica=devices_per_replica,
                )
            )
        starts = range(0, len(devices), devices_per_replica)
        self.of_replica = [list(devices[start : start + devices_per_replica]) for start in starts]
        self.layer_placement = dict(layer_placement)
        self.layers_not_seen = set(layer_placement)
        for index in self.layer_placement.values():
            self.check(index)
        self._creating = threading.local()

    def check(self, index: int, **details: Any) -> int:
        """Returns the number of a logical device; raises a ConfigurationError, with details, if a replica lacks it."""
        count = len(self.of_replica[0])
        if not is_count(index, 0, count - 1):
            raise ConfigurationError(
                message(
                    f"There is no such logical device: a replica has {count}.",
                    hint=f"use a number from 0 to {count - 1}, or make the strategy with a larger devices_per_replica.",
                    logical_device=index,
                    **details,
                )
            )
        return index

    @contextlib.contextmanager
    def for_variables(self, index: int) -> Iterator[None]:
        """Puts variables that are created inside on one logical device of each replica."""
        before = getattr(self._creating, "index", None)
        self._creating.index = self.check(index)
        try:
            yield
        finally:
            self._creating.index = before

    def placement(self) -> Placement | None:
        """Returns the placement of a variable that is created now; None for the strategy's default."""
        index = getattr(self._creating, "index", None)
        return None if not index else Placement([devices[index] for devices in self.of_replica])

    @contextlib.contextmanager
    def for_operations(self, index: int) -> Iterator[None]:
        """Puts operations that are built inside on a logical device of the replica that builds them."""
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))
        index = self.check(index, replica=replica)
        with tf.device(self.of_replica[replica][index]):
            yield

    @contextlib.contextmanager
    def for_layer(self, name: str) -> Iterator[None]:
        """Places a Keras layer as in `layer_placement`; does nothing for a layer that is not named there."""
        index = self.layer_placement.get(name)
        self.layers_not_seen.discard(name)
        if index is None:
            yield
        else:
            with self.for_variables(index), self.for_operations(index):
                yield


class Placement:
    """A device for each replica. TensorFlow reads it like a variable to colocate with."""

    def __init__(self, devices: list[str]) -> None:
        self._devices = tuple(devices)


def logical_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Puts the operations of a step that are built inside on a logical device of this replica.

    Args:
        index: 0 to `devices_per_replica - 1`. Inputs, and operations that are not placed, are on 0.

    Raises:
        ConfigurationError: The replica does not have the device. Without a strategy there is device 0 only.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2)
        >>> def step():
        ...     with tfrep.logical_device(1):
        ...         return tf.ones([]) + 1.0
        >>> strategy.run(step).device.rpartition("device:")[2]
        'CPU:1'
    """
    extended = traced_for() or tf.distribute.get_strategy().extended
    devices = getattr(extended, "logical_devices", None) or LogicalDevices([""], 1, {})
    if index == 0 and devices.of_replica == [[""]]:
        return contextlib.nullcontext()
    return devices.for_operations(index)
