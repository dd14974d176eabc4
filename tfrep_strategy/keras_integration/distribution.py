"""`keras.distribution` on TensorFlow: the devices of a mesh are the replicas of a strategy, which a distribution brings into scope.

Keras's own module for TensorFlow is a prototype that its source says not to use. This module takes its place, see `tables.py`.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import distribution

from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.environments.keras_distribution import ADDRESSES, RANK, SIZE, KerasDistributionEnvironment
from tfrep_strategy.communicators.sharding import Along
from tfrep_strategy.core.limits import verification
from tfrep_strategy.errors import ConfigurationError, TfrepError, message, warn
from tfrep_strategy.keras_integration.finding import driver_of

make_strategy: Callable[[Sequence[str]], Any] | None = None
"""Makes the strategy for the names of devices. The room above, where strategies are, sets it."""
_entered: Any = None
"""The strategy that a distribution has brought into scope."""
_checked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Distributions whose layout maps were found to fit a model."""


def list_devices(device_type: str | None = None) -> list[str]:
    """Lists the devices of all replicas: those of the strategy in scope, or of the strategy that a distribution would get.

    Args:
        device_type: `"cpu"`, `"gpu"`, or None for GPUs where there are any, else CPUs.

    Returns:
        Their names, `["gpu:0", "gpu:1", ...]`. Those of other processes are counted on.
    """
    kind = (device_type or ("gpu" if tf.config.get_visible_devices("GPU") else "cpu")).lower()
    strategy = tf.distribute.get_strategy()
    if _stands_for() > 1:
        count = _stands_for()
    elif driver_of(strategy) is not None:
        count = strategy.num_replicas_in_sync
    elif (size := detect_environment().size) > 1:
        count = size
    else:
        count = len(tf.config.list_logical_devices(kind.upper()))
    return [f"{kind}:{i}" for i in range(count)]


def _stands_for() -> int:
    """Returns the number of replicas that `tfrep verify` compares this run of one device with; 0 otherwise."""
    asked = verification()
    return 0 if asked is None else asked.stands_for


def get_device_count(device_type: str | None = None) -> int:
    """Counts the devices of all replicas; see `list_devices`."""
    return len(list_devices(device_type))


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Says which process this is. Without arguments, or where a launcher has said it already, nothing is changed.

    Args:
        job_addresses: `host:port` of process 0, or of each process, separated by commas.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.

    Raises:
        ConfigurationError: The arguments contradict each other, or the launcher.
    """
    if _stands_for():
        return
    found = detect_environment()
    if found.size == 1 and num_processes not in (None, 1):
        given = {ADDRESSES: job_addresses, SIZE: num_processes, RANK: process_id}
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})
        try:
            KerasDistributionEnvironment()
        except ConfigurationError:
            for name in given:
                os.environ.pop(name, None)
            raise
        found = detect_environment()
    asked = found.size if num_processes is None else num_processes, found.rank if process_id is None else process_id
    if asked != (found.size, found.rank):
        raise ConfigurationError(
            message(
                "The arguments contradict the launcher, which has given this process another rank or world size.",
                hint="call keras.distribution.initialize() without arguments under a launcher.",
                num_processes=num_processes,
                process_id=process_id,
                launcher=found.describe(),
            )
        )


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns the tensor: what replicas hold of a tensor inside a step follows from the rules of its operations."""
    return tensor


def enter(set_distribution: Any, value: Any) -> None:
    """Brings the strategy of a distribution into scope, and leaves that of the one before.

    Args:
        set_distribution: Keras's function.
        value: The distribution; None for no distribution.

    Raises:
        ConfigurationError: The mesh has another number of devices than the strategy in scope has replicas.
    """
    global _entered
    set_distribution(None)
    if _entered is not None:
        tf.distribute.experimental_set_strategy(None)
        _entered = None
    if value is not None and not _stands_for():
        devices = [str(each) for each in value.device_mesh.devices.flatten()]
        strategy = tf.distribute.get_strategy()
        if not tf.distribute.has_strategy() and (len(devices) > 1 or detect_environment().size > 1):
            if make_strategy is None:
                raise TfrepError(message("No strategies are known.", hint="import tfrep_strategy.strategies first."))
            strategy = make_strategy(devices)
        if strategy.num_replicas_in_sync != len(devices):
            raise ConfigurationError(
                message(
                    "The mesh must have one device for each replica.",
                    hint="make the mesh from keras.distribution.list_devices().",
                    devices=devices,
                    replicas=strategy.num_replicas_in_sync,
                )
            )
        if strategy.num_replicas_in_sync > 1:
            _note_mesh(value, strategy)
            if not tf.distribute.has_strategy():
                tf.distribute.experimental_set_strategy(strategy)
                _entered = strategy
    set_distribution(value)


def _note_mesh(value: Any, strategy: Any) -> None:
    """Notes how many replicas share the weights of a model among them, and compute with the same rows of a batch."""
    names, shape = list(value.device_mesh.axis_names), value.device_mesh.shape
    batch = names.index(value.batch_dim_name)
    groups, replicas = int(shape[batch]), strategy.num_replicas_in_sync
    extended = strategy.extended
    extended.model_size = replicas // groups if isinstance(value, distribution.ModelParallel) else 1
    if 1 < extended.model_size < replicas:
        for hinders, hint in (
            (batch > 0, "name the axis of the batch first."),
            (strategy.shard_optimizer_state, "leave out shard_optimizer_state."),
            (strategy.gradient_aggregator is not None, "leave out gradient_aggregator."),
        ):
            if hinders:
                extended.model_size = 1
                warn(
                    message(
                        "All devices of the mesh share the rows of a batch, and gather the weights that the layouts split.",
                        hint=f"to split the work of layers as well, {hint}",
                        mesh=dict(zip(names, shape, strict=True)),
                    )
                )
                break


def cut_of_layout(variable: Any, value: Any, replicas: int, model_size: int) -> Along | None:
    """Returns the part of a new variable that each replica holds by the layout of the distribution; None if each holds all of it.

    Args:
        variable: A Keras variable, which gets its layout.
        value: Its initial value, or a function that returns it.
        replicas: The number of replicas.
        model_size: The number of replicas that compute with the same rows.

    Raises:
        ConfigurationError: The layout has another number of axes than the variable, or the mesh does not divide an axis.
    """
    current = distribution.distribution()
    if not isinstance(current, distribution.ModelParallel) or replicas == 1:
        return None
    if not callable(value):
        variable._shape = tuple(np.shape(value))  # Keras's layouts ask for it.
    layout = variable._layout = current.get_variable_layout(variable)
    shape = tuple(variable._shape)
    sizes = dict(zip(current.device_mesh.axis_names, current.device_mesh.shape, strict=True))
    axes = [axis for axis, name in enumerate(layout.axes) if sizes.get(name, 1) > 1]
    if axes and len(layout.axes) != len(shape):
        raise ConfigurationError(
            message(
                "A layout has one entry for each axis of its variable.",
                hint="write None for an axis that is not split.",
                variable=variable.path,
                shape=shape,
                layout=layout.axes,
            )
        )
    for axis in axes:
        if shape[axis] % sizes[layout.axes[axis]]:
            raise ConfigurationError(
                message(
                    "The size of a variable's axis is not a multiple of the number of devices along its axis of the mesh.",
                    hint="split another axis, change its size, or leave the variable out of the layout map.",
                    variable=variable.path,
                    shape=shape,
                    layout=layout.axes,
                    mesh=sizes,
                )
            )
    mesh = replicas // model_size, model_size
    of_batch = [axis for axis in axes if layout.axes[axis] == current.batch_dim_name]
    of_model = [axis for axis in axes if axis not in of_batch]
    within = _divided(shape, of_model, model_size)
    # Without groups, which axis is split decides how products are summed.
    across = _divided(shape, of_batch if model_size > 1 else of_model + of_batch, mesh[0])
    if axes and within is None and across is None:
        warn(f"{variable.path} {list(shape)} stays whole: {replicas} devices do not divide an axis that its layout splits.")
        return None
    return Along(shape, mesh, (across, within)) if axes else None


def _divided(shape: Sequence[int], axes: Sequence[int], devices: int) -> int | None:
    """Returns the first of some axes that a number of devices divides; None if there is none, or one device."""
    return next((axis for axis in axes if devices > 1 and shape[axis] and shape[axis] % devices == 0), None)


def check_layouts(model: Any) -> None:
    """Checks that a layout map names variables of a model. Other models may have been made with the same map.

    Args:
        model: A built model.

    Raises:
        ConfigurationError: No pattern of the map matches a variable.
    """
    current = distribution.distribution()
    if not isinstance(current, distribution.ModelParallel) or current in _checked:
        return
    of_variables = [pattern for pattern in current._layout_map if not pattern.endswith("/output")]
    unused = [each for each in of_variables if not any(re.fullmatch(each, variable.path) for variable in model.variables)]
    if unused and len(unused) == len(of_variables):
        raise ConfigurationError(
            message(
                "No pattern of the layout map matches a variable of the model.",
                hint="a pattern must match a whole path: print([v.path for v in model.variables]).",
                patterns=unused,
            )
        )
    _checked.add(current)
    if unused:
        warn(f"Patterns of the layout map match no variable of the model {model.name!r}: {', '.join(unused)}.")
