"""Model parallelism: each replica has several devices, numbered 0, 1, ... within it.

Only where things are placed changes; the answer is that of one device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


class LogicalDevices:
    """The devices of each replica of a strategy.

    Args:
        devices: All of them; the first `devices_per_replica` are those of replica 0, and so on.
        devices_per_replica: How many a replica has.
        layer_placement: The logical device of Keras layers, by name; layers inside a named one go with it.

    Raises:
        ConfigurationError: when the devices do not divide, or a layer is placed on a device that a replica does not have.

    Example:
        >>> LogicalDevices(["CPU:0", "CPU:1", "CPU:2", "CPU:3"], 2, {}).of_replica
        [['CPU:0', 'CPU:1'], ['CPU:2', 'CPU:3']]
    """

    def __init__(self, devices: Sequence[str], devices_per_replica: int, layer_placement: Mapping[str, int]) -> None:
        if devices_per_replica < 1 or len(devices) % devices_per_replica:
            raise ConfigurationError(
                message(
                    "The devices do not divide among the replicas.",
                    hint="give a multiple of devices_per_replica.",
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
        """Returns a logical device's number; raises a ConfigurationError, with details, where a replica does not have it."""
        count = len(self.of_replica[0])
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ConfigurationError(
                message(
                    f"A replica has {count} logical device(s).",
                    hint="make the strategy with devices_per_replica=...; the first device is 0.",
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
        """Where a variable goes that is created now; None where the strategy puts it anyway."""
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
        """Puts a Keras layer where `layer_placement` says, or leaves it where it is."""
        index = self.layer_placement.get(name)
        self.layers_not_seen.discard(name)
        if index is None:
            yield
        else:
            with self.for_variables(index), self.for_operations(index):
                yield


class Placement:
    """One device for each replica, in the form in which TensorFlow asks a variable where another one is to be."""

    def __init__(self, devices: list[str]) -> None:
        self._devices = tuple(devices)


def logical_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Puts the operations of a step that are built inside on a logical device of this replica.

    Args:
        index: 0 to `devices_per_replica - 1`. Inputs, and all that is not placed, are on 0.

    Raises:
        ConfigurationError: when a replica does not have it; under no strategy it has one.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2)
        >>> def step():
        ...     with tfrep.logical_device(1):
        ...         return tf.ones([]) + 1.0
        >>> strategy.run(step).device.rpartition("device:")[2]
        'CPU:1'
    """
    devices = getattr(tf.distribute.get_strategy(), "logical_devices", None) or LogicalDevices([""], 1, {})
    if index == 0 and devices.of_replica == [[""]]:
        return contextlib.nullcontext()
    return devices.for_operations(index)
