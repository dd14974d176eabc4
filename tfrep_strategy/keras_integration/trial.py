"""A place outside of replicas where a user's function is tried, which tells whether the function calls collectives."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TrialContext(tf.distribute.ReplicaContext):
    """The context of the only replica, for a `with` block on a thread without a strategy.

    Example:
        >>> with TrialContext() as trial:
        ...     total = tf.distribute.get_replica_context().all_reduce("sum", tf.constant(2.0))
        >>> float(total), trial.calls_collectives
        (2.0, True)
    """

    def __init__(self) -> None:
        super().__init__(tf.distribute.get_strategy(), 0)
        self.calls_collectives = False
        """Whether the function has called a collective, of this package or of TensorFlow."""

    def __enter__(self) -> TrialContext:
        super().__enter__()
        return self

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        self.calls_collectives = True
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        self.calls_collectives = True
        return value


def note_collective() -> None:
    """Tells a trial, if there is one, that a collective was called."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, TrialContext):
        context.calls_collectives = True
