"""Maps a function over items that are spread over the replicas: `map_gather` and `map_reduce`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.collectives.calls import Nest, flow_of
from tfrep_strategy.collectives.checks import check_op
from tfrep_strategy.collectives.exchanges import all_gather
from tfrep_strategy.collectives.reductions import all_reduce
from tfrep_strategy.collectives.spread_work import Spread, reduce_nests
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.groups import ReplicaGroup


def map_gather(fn: Callable[[Any], Nest], items: Any, *, group: ReplicaGroup | None = None) -> list[Nest]:
    """Spreads items over the replicas, and gives every replica all results.

    Args:
        fn: Takes an item and returns a nest of tensors. Structure and dtypes are the same for every item; shapes may
            differ. It calls no collectives.
        items: A sequence, or a tensor or array whose first axis holds the items; the same on all replicas. Replica r
            computes items r, r + num_replicas, ... A replica without items computes the first one and discards it.
        group: The replicas that take part; None for all.

    Returns:
        The results, in the order of the items, on every replica. Gradients flow to the replica that computed an item.

    Raises:
        ConfigurationError: `fn` returns nests of different structures.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> squares = strategy.run(lambda: tfrep.map_gather(lambda x: x * x, [tf.constant(float(i)) for i in range(3)]))
        >>> [float(square.values[1]) for square in squares]
        [0.0, 1.0, 4.0]
    """
    items = _listed(items)
    if not items:
        return []
    communicator = flow_of(group).communicator
    spread = Spread(fn, items, communicator.rank, communicator.size)
    return spread.gather(lambda nest: all_gather(nest, group=group))


def map_reduce(fn: Callable[[Any], Nest], items: Any, op: str = "sum", *, group: ReplicaGroup | None = None) -> Nest:
    """Spreads items over the replicas, and gives every replica the reduction of all results.

    Args:
        fn: Takes an item and returns a nest of tensors. Structure, dtypes and shapes are the same for every item. It calls
            no collectives.
        items: As for `map_gather`; at least one.
        op: As for `all_reduce`, but over the items.
        group: The replicas that take part; None for all.

    Returns:
        The nest `fn(items[0]) op fn(items[1]) op ...`, equal on all replicas.

    Raises:
        ConfigurationError: There are no items, or a dtype does not support `op`.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> float(strategy.run(lambda: tfrep.map_reduce(tf.exp, [tf.zeros([])] * 3, "mean")).values[0])
        1.0
    """
    items = _listed(items)
    if not items:
        hint = "pass a list with an item or more, the same on all replicas."
        raise ConfigurationError(message("map_reduce needs at least one item.", hint, items=items))
    communicator = flow_of(group).communicator
    spread = Spread(fn, items, communicator.rank, communicator.size)
    for spec in tf.nest.flatten(spread.specs[0]):
        check_op(op, spec)
    if spread.has_static_shapes():
        return spread.reduce(op, lambda nest, op: all_reduce(nest, op, group=group))
    return reduce_nests(spread.gather(lambda nest: all_gather(nest, group=group)), op)


def _listed(items: Any) -> list[Any]:
    """Returns the items as a list. A tensor is cut along its first axis, whose size must be known while a step is traced."""
    if not tf.is_tensor(items):
        return list(items)
    if not items.shape.rank or items.shape[0] is None:
        raise ConfigurationError(
            message(
                "The first dimension of a tensor of items must be known.",
                hint="set it with tf.ensure_shape, or pass a list.",
                shape=items.shape,
            )
        )
    return [items[i] for i in range(items.shape[0])]
