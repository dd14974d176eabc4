"""Work on a list of items, spread over the replicas."""

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
    """Spreads items over the replicas, and gives every replica the results of all.

    Args:
        fn: Makes a nest of tensors of one item; of the same structure and dtypes for every item, the shapes may differ. It
            calls no collectives.
        items: A sequence of anything that `fn` takes, or a tensor or array of such along the first axis; the same on all
            replicas. Replica r computes items r, r + num_replicas, ... (one that has none computes the first, and takes
            nothing of it).
        group: Only these replicas take part.

    Returns:
        The results, in the order of the items, on every replica. Gradients flow to the replica that computed an item.

    Raises:
        ConfigurationError: when `fn` returns nests of different structures.

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
    """Spreads items over the replicas, and gives every replica the reduction of the results.

    Args:
        fn: Makes a nest of tensors of one item; of the same structure, dtypes and shapes for every item. It calls no
            collectives.
        items: As for `map_gather`; at least one.
        op: As for `all_reduce`; over the items.
        group: Only these replicas take part.

    Returns:
        The nest `fn(items[0]) op fn(items[1]) op ...`, equal on all replicas.

    Raises:
        ConfigurationError: for no items, or an op that a dtype cannot do.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> float(strategy.run(lambda: tfrep.map_reduce(tf.exp, [tf.zeros([])] * 3, "mean")).values[0])
        1.0
    """
    items = _listed(items)
    if not items:
        raise ConfigurationError(message("map_reduce needs at least one item.", items=items))
    communicator = flow_of(group).communicator
    spread = Spread(fn, items, communicator.rank, communicator.size)
    for spec in tf.nest.flatten(spread.specs[0]):
        check_op(op, spec)
    if spread.has_static_shapes():
        return spread.reduce(op, lambda nest, op: all_reduce(nest, op, group=group))
    return reduce_nests(spread.gather(lambda nest: all_gather(nest, group=group)), op)


def _listed(items: Any) -> list[Any]:
    """Takes tensors apart along their first axis; the number of items has to be known while a step is built."""
    if not tf.is_tensor(items):
        return list(items)
    if not items.shape.rank or items.shape[0] is None:
        raise ConfigurationError(
            message(
                "A tensor of items needs a first dimension that is known.",
                hint="set it by tf.ensure_shape, or give a list.",
                shape=items.shape,
            )
        )
    return [items[i] for i in range(items.shape[0])]
