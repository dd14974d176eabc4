"""The id of the current replica, and the number of replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.strategies.groups import ReplicaGroup


def replica_id() -> Any:
    """Returns the id of this replica, 0 to `num_replicas() - 1`; 0 outside a step.

    Returns:
        An int. Under TensorFlow's strategies that number replicas at run time, an int32 scalar.

    Example:
        >>> tfrep.replica_id()
        0
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    known = tf.get_static_value(context.replica_id_in_sync_group)
    return context.replica_id_in_sync_group if known is None else int(known)


def num_replicas(group: ReplicaGroup | None = None) -> int:
    """Returns how many replicas run this step together; 1 outside a step.

    Args:
        group: A group whose members to count; None for all replicas.

    Example:
        >>> tfrep.num_replicas()
        1
    """
    if group is not None:
        return len(group)
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync
