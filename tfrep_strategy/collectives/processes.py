"""Waiting for each other, and Python objects of the processes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.collectives.calls import launch, outside_step
from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.strategies.of_process import process_communicator


def barrier(*, group: ReplicaGroup | None = None) -> None:
    """Waits until every replica has called it: inside a step the replicas, outside a step the processes.

    Outside a step it needs no scope, only a strategy that was made before.

    Args:
        group: Only these replicas take part; inside a step.

    Raises:
        ConfigurationError: Outside a step, where this process is one of several and no strategy connects them.

    Example:
        >>> tfrep.barrier()
    """
    if outside_step():
        process_communicator().barrier()
        return

    def wait(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # What comes back is used by an operation that a function has to run.
        for total in flow.all_reduce(tensors, "sum"):
            tf.debugging.assert_greater(total, 0)
        return tensors

    launch("barrier", tf.ones([], tf.int32), group, wait)


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Gives every process one process's Python object; outside a step, once a strategy was made.

    Args:
        value: Picklable; only the source's counts.
        source: Rank of the sending process.

    Returns:
        The source's object.

    Raises:
        ConfigurationError: inside a step or a `tf.function`, or when there is no such process.

    Example:
        >>> tfrep.broadcast_object({"run": 7})
        {'run': 7}
    """
    check_no_step("broadcast_object")
    communicator = process_communicator()
    communicator.check_root(source)
    return communicator.broadcast_object(value, source)


def all_gather_object(value: Any) -> list[Any]:
    """Gives every process the Python objects of all; outside a step, once a strategy was made.

    Args:
        value: Picklable.

    Returns:
        One object for each process, by rank.

    Raises:
        ConfigurationError: inside a step or a `tf.function`.

    Example:
        >>> tfrep.all_gather_object("alone")
        ['alone']
    """
    check_no_step("all_gather_object")
    return process_communicator().all_gather_object(value)


def check_no_step(kind: str) -> None:
    """Refuses inside a step what is for the processes.

    Raises:
        ConfigurationError: The caller is inside a step or a `tf.function`.
    """
    if not tf.executing_eagerly() or not outside_step():
        raise ConfigurationError(f"{kind} was called inside a step.\nHint: objects are for what happens once, outside it.")
