"""The common path of all collectives: checks the arguments, finds the communicator, packs the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.collectives.checks import (
    check_equal,
    check_shapes,
    check_structures,
    describe,
    has_names,
    to_tensor,
)
from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.collectives.replicas import replica_id
from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.communicators.context import ContextCommunicator
from tfrep_strategy.communicators.peers.checked import CheckedCommunicator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.protocol import current_share
from tfrep_strategy.strategies.groups import ReplicaGroup

Nest = Any


def launch(
    kind: str,
    nest: Nest,
    group: ReplicaGroup | None,
    work: Callable[[Flow, list[tf.Tensor]], list[tf.Tensor]],
    check: Callable[[tf.Tensor], None] = lambda tensor: None,
    **options: Any,
) -> Nest:
    """Runs one collective; all of them pass through here.

    Args:
        kind: The name of the collective.
        nest: The nest of this replica.
        group: The replicas that take part; None for all.
        work: Runs the collective: takes this replica's flow and tensors, returns the resulting tensors.
        check: Raises a ConfigurationError for a tensor that the collective cannot take.
        **options: Further arguments that all replicas must agree on.

    Returns:
        The result, in the structure of `nest`.
    """
    tensors = [to_tensor(kind, leaf) for leaf in tf.nest.flatten(nest)]
    flow = flow_of(group)
    try:
        for tensor in tensors:
            check(tensor)
    except ConfigurationError as error:
        raise ConfigurationError(f"{kind} on replica {replica_id()}: {error}") from None
    call = describe(kind, options, nest, tensors)
    if isinstance(flow.communicator, CheckedCommunicator):
        if tensors and (flow.communicator.monitor.checks_every_call or has_names(call)):
            members = range(flow.communicator.size) if group is None else group.replicas
            tensors = check_structures(call, tensors, members, flow)
    elif hasattr(flow.communicator, "compare"):
        replicas = flow.communicator.compare((replica_id(), call), check_equal)
        if replicas:
            tensors = check_shapes(call, tensors, replicas, flow.communicator)
    results = work(flow, tensors) if tensors else []
    return tf.nest.pack_sequence_as(nest, results)


def flow_of(group: ReplicaGroup | None) -> Flow:
    """Returns the collectives of the calling replica, between all replicas or those of a group.

    Args:
        group: The group; None for all replicas.

    Raises:
        ConfigurationError: The replicas cannot communicate, or the group belongs to another strategy.
    """
    context = tf.distribute.get_replica_context()
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ConfigurationError(
            message(
                "The workers of a ParameterServerStrategy do not wait for each other, so they cannot run collectives.",
                hint="use a MirroredStrategy or a MultiWorkerStrategy for collectives.",
                strategy=type(strategy).__name__,
            )
        )
    if group is not None and not isinstance(group, ReplicaGroup):
        raise ConfigurationError(
            message("`group` is not a ReplicaGroup.", hint="make one with strategy.new_group([0, 2]).", group=group)
        )
    if context is None or (context.num_replicas_in_sync == 1 and not hasattr(strategy.extended, "communicator_of")):
        return Flow(SingleCommunicator(), None)
    if group is not None and group.strategy is not strategy:
        hint = "make it with the strategy in whose scope it is used."
        raise ConfigurationError(message("The group belongs to another strategy.", hint, group=group))
    replica = replica_id()
    communicator: Communicator
    if group is not None:
        communicator = group.communicator_of(replica)
    elif hasattr(strategy.extended, "communicator_of"):
        communicator = strategy.extended.communicator_of(replica)
    else:
        communicator = ContextCommunicator(context)
    return Flow(communicator, current_share())


def outside_step() -> bool:
    """Returns whether the caller is outside replicas: in the scope of a strategy, or in none."""
    return not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None
