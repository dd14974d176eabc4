"""Collectives between processes: a barrier, the exchange of Python objects, and work that the chief does first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, PeerError
from tfrep_strategy.strategies.groups import ReplicaGroup, is_chief_process, process_communicator
from tfrep_strategy.training.collectives.calls import launch, outside_step
from tfrep_strategy.training.collectives.flow import Flow


def barrier(*, group: ReplicaGroup | None = None) -> None:
    """Waits until all have called it: inside a step all replicas, outside a step all processes.

    Outside a step it needs no scope, but a strategy must have been made before.

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
    """Sends a Python object of one process to all. Call it outside a step, after a strategy was made.

    Args:
        value: A picklable object. Only the root's is sent.
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
    """Gathers the Python objects of all processes on each. Call it outside a step, after a strategy was made.

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


def is_chief() -> bool:
    """Returns whether this process is the chief, which writes files: rank 0, or a single process.

    It can be called anywhere, even before a strategy is made.

    Returns:
        True on the chief.

    Example:
        >>> if tfrep.is_chief():
        ...     print("only once")
        only once
    """
    return is_chief_process()


@contextlib.contextmanager
def chief_first() -> Iterator[None]:
    """Runs the body on the chief first, then on the other processes. They find the files that the chief has written.

    Every process must call it, after a strategy was made. The others wait as in a collective. If the chief may take
    longer than `TFREP_TIMEOUT` (600 seconds), raise that limit.

    Yields:
        Nothing.

    Raises:
        PeerError: The chief's body raised an error. Raised on the other processes; their body does not run.
        ConfigurationError: The caller is inside a step, or no strategy connects the processes.

    Example:
        >>> with tfrep.chief_first():
        ...     print("rank 0 comes here before the others")
        rank 0 comes here before the others
    """
    check_no_step("chief_first")
    communicator = process_communicator()
    if communicator.rank:
        failure = communicator.broadcast_object(None)
        if failure is not None:
            raise PeerError(f"The chief failed in chief_first: {failure}")
        yield
        return
    try:
        yield
    except Exception as error:
        communicator.broadcast_object(f"{type(error).__name__}: {error}")
        raise
    communicator.broadcast_object(None)
