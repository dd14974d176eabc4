"""Collectives between processes: a barrier, and the exchange of Python objects."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.collectives.calls import launch, outside_step
from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.strategies.of_process import process_communicator


def barrier(*, group: ReplicaGroup | None = None) -> None:
    """Waits until all have called it: inside a step all replicas, outside a step all processes.

    Outside a step it needs no scope. A strategy must have been made before.

    Args:
        group: The replicas that take part; None for all. Used inside a step only.

    Raises:
        ConfigurationError: The caller is outside a step, and no strategy connects this process with the others.

    Example:
        >>> tfrep.barrier()
    """
    if outside_step():
        process_communicator().barrier()
        return

    def wait(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # The assertion is an operation that a function must run, so that it runs the all_reduce too.
        for total in flow.all_reduce(tensors, "sum"):
            tf.debugging.assert_greater(total, 0)
        return tensors

    launch("barrier", tf.ones([], tf.int32), group, wait)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Gives every process the Python object of one. Call it outside a step, after a strategy was made.

    Args:
        value: A picklable object. Only that of the root is sent.
        root: Rank of the process that sends.

    Returns:
        The root's object.

    Raises:
        ConfigurationError: The caller is inside a step or a `tf.function`, or the rank does not exist.

    Example:
        >>> tfrep.broadcast_object({"run": 7})
        {'run': 7}
    """
    check_no_step("broadcast_object")
    communicator = process_communicator()
    communicator.check_root(root)
    return communicator.broadcast_object(value, root)


def all_gather_object(value: Any) -> list[Any]:
    """Gives every process the Python objects of all. Call it outside a step, after a strategy was made.

    Args:
        value: A picklable object.

    Returns:
        One object for each process, by rank.

    Raises:
        ConfigurationError: The caller is inside a step or a `tf.function`.

    Example:
        >>> tfrep.all_gather_object("alone")
        ['alone']
    """
    check_no_step("all_gather_object")
    return process_communicator().all_gather_object(value)


def check_no_step(kind: str) -> None:
    """Refuses to run a collective of processes inside a step.

    Raises:
        ConfigurationError: The caller is inside a step or a `tf.function`.
    """
    if not tf.executing_eagerly() or not outside_step():
        raise ConfigurationError(f"{kind} was called inside a step.\nHint: call it outside the step.")
