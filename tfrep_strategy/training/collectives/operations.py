"""Collectives between replicas that reduce tensors, or move values unchanged."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.data.batches import cut
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.training.collectives.calls import (
    Nest,
    broadcast_strings,
    check_op,
    check_root,
    check_rows,
    exchange_rows,
    from_real,
    gather_along,
    launch,
    product,
    replica_id,
    to_real,
)
from tfrep_strategy.training.collectives.flow import Flow


def all_gather(nest: Nest, axis: int = 0, stack: bool = False, *, group: ReplicaGroup | None = None) -> Nest:
    """Gathers the tensors of all replicas on each, joined in replica order.

    Args:
        nest: A nest of tensors of any dtype, string included. Their sizes along `axis` may differ between replicas.
        axis: The dimension to join along.
        stack: Whether to join along a new dimension `axis`. The shapes must then be equal on all replicas.
        group: The replicas that take part; None for all.

    Returns:
        A nest of the same structure.

    Raises:
        ConfigurationError: A tensor does not have the axis.
        DesyncError: Dimensions other than `axis` differ.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.all_gather(tf.range(tfrep.replica_id() + 1)), tfrep.all_gather(tfrep.replica_id(), stack=True)
        >>> joined, stacked = strategy.run(step)
        >>> joined.values[0].numpy().tolist(), stacked.values[1].numpy().tolist()
        ([0, 0, 1], [0, 1])
    """

    def check(tensor: tf.Tensor) -> None:
        rank = tensor.shape.rank + bool(stack)
        if not -rank <= axis < rank:
            hint = "use stack=True to join scalars." if tensor.shape.rank == 0 else f"the tensor has {rank} dimensions."
            raise ConfigurationError(message("A tensor does not have this axis.", hint=hint, axis=axis, shape=tensor.shape))

    def gather(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [gather_along(flow, tf.expand_dims(t, axis) if stack else t, axis) for t in tensors]

    return launch("all_gather", nest, group, gather, check=check, axis=axis, stack=stack)


def broadcast(nest: Nest, root: int = 0, *, group: ReplicaGroup | None = None) -> Nest:
    """Sends the tensors of one replica to all.

    Args:
        nest: A nest of tensors of any dtype, string included; the same shapes on all replicas.
        root: Id of the replica that sends; also with a group, the id in the strategy.
        group: The replicas that take part; None for all.

    Returns:
        The nest of the root. Gradients flow back to the root.

    Raises:
        ConfigurationError: The replica does not exist, or is not in the group.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> [int(v) for v in strategy.run(lambda: tfrep.broadcast(tfrep.replica_id() + 5, 1)).values]
        [6, 6]
    """

    def send(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        member = check_root(root, group, flow.communicator.size)
        real = [to_real(t) for t in tensors if t.dtype != tf.string]
        sent = iter(flow.broadcast(real, member)) if real else iter([])
        return [broadcast_strings(flow, t, member) if t.dtype == tf.string else from_real(next(sent), t) for t in tensors]

    return launch("broadcast", nest, group, send, root=root)


def all_to_all(nest: Nest, splits: Any = None, *, group: ReplicaGroup | None = None) -> Nest:
    """Sends a part of the rows to each replica, and receives a part from each.

    Args:
        nest: A nest of tensors of shape `[rows, ...]` of any dtype, string included.
        splits: Number of rows for each replica: int32 of shape `[num_replicas]`, with sum `rows`. Default: equal parts.
        group: The replicas that take part; None for all.

    Returns:
        A nest of the received rows, in replica order. With `splits`, a pair of this nest and the number of rows
        from each replica (int32 of shape `[num_replicas]`).

    Raises:
        ConfigurationError: A tensor is a scalar, `splits` has another length or another sum, or the rows do not divide.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.all_to_all(tf.constant([1, 2]) + 10 * tfrep.replica_id())
        >>> [v.numpy().tolist() for v in strategy.run(step).values]
        [[1, 11], [2, 12]]
    """
    counts: list[tf.Tensor] = []

    def exchange(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        size = flow.communicator.size
        outside = group is not None and size < len(group)  # A replica outside the group keeps its own rows.
        result = []
        for tensor in tensors:
            if outside or splits is None:
                own = _even_splits(tensor, size)
            else:
                own = _to_splits(splits, size, tensor)
            rows, received = exchange_rows(flow, tensor, own)
            counts[:] = [tf.zeros([len(group)], tf.int32) if outside and group is not None else received]
            result.append(rows)
        return result

    rows = launch("all_to_all", nest, group, exchange, check=lambda t: check_rows("all_to_all", t))
    return rows if splits is None else (rows, counts[0])


def _even_splits(tensor: tf.Tensor, size: int) -> tf.Tensor:
    rows = tensor.shape[0]
    if rows is not None and rows % size:
        raise ConfigurationError(
            message(
                f"all_to_all on replica {replica_id()}: the rows do not divide among {size} replicas.",
                hint="give splits.",
                shape=tensor.shape,
            )
        )
    count = tf.shape(tensor)[0]
    tf.debugging.assert_equal(count % size, 0, "all_to_all: the rows do not divide among the replicas; give splits.")
    return tf.fill([size], count // size)


def _to_splits(splits: Any, size: int, tensor: tf.Tensor) -> tf.Tensor:
    own = tf.convert_to_tensor(splits, tf.int32)
    if own.shape.rank != 1 or own.shape[0] not in (None, size):
        raise ConfigurationError(
            message(
                f"all_to_all on replica {replica_id()}: splits needs one number of rows for each replica.",
                hint="pass a vector of whole numbers: how many rows go to replica 0, to replica 1, and so on.",
                splits=splits,
                num_replicas=size,
            )
        )
    known, rows = tf.get_static_value(own), tensor.shape[0]
    if known is not None and rows is not None and (known.sum() != rows or known.min() < 0):
        raise ConfigurationError(
            message(
                f"all_to_all on replica {replica_id()}: the splits must be 0 or more and add up to all rows.",
                hint="let the splits add up to the number of rows.",
                rows=rows,
                splits=known.tolist(),
            )
        )
    # Compared before anything is sent, so that replicas can continue if all are refused.
    what = "all_to_all: the splits must be 0 or more and add up to all rows."
    checks = [tf.debugging.assert_equal(tf.reduce_sum(own), tf.shape(tensor)[0], what), tf.debugging.assert_non_negative(own, what)]
    with tf.control_dependencies([] if tf.executing_eagerly() else checks):
        return tf.ensure_shape(tf.identity(own), [size])


def all_reduce(nest: Nest, op: str = "sum", *, group: ReplicaGroup | None = None) -> Nest:
    """Reduces each tensor over the replicas.

    Args:
        nest: A nest of tensors of any numeric dtype or bool; the same shapes on all replicas.
        op: `"sum"`, `"mean"` (integers are rounded towards zero), `"min"`, `"max"` or `"product"`. Bool supports `"min"`
            (all) and `"max"` (any). Complex numbers support `"sum"`, `"mean"` and `"product"`.
        group: The replicas that take part; None for all.

    Returns:
        The reduced nest, of the same structure, shapes and dtypes, equal on all replicas.

    Raises:
        ConfigurationError: `op` is unknown, or a dtype does not support it.
        DesyncError: The replicas pass nests of different structures.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.all_reduce({"a": tfrep.replica_id() + 1.0}, "max")["a"]
        >>> [float(v) for v in strategy.experimental_local_results(strategy.run(step))]
        [2.0, 2.0]
    """

    def reduce(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if op == "product" and any(t.dtype.is_complex for t in tensors):
            return [product(flow, t) for t in tensors]
        reduced = flow.all_reduce([to_real(t) for t in tensors], op)
        return [from_real(r, t) for r, t in zip(reduced, tensors, strict=True)]

    return launch("all_reduce", nest, group, reduce, check=lambda t: check_op(op, t), op=op)


def all_sum(nest: Nest, *, group: ReplicaGroup | None = None) -> Nest:
    """Sums each tensor over the replicas: `all_reduce(nest, "sum")`.

    Args:
        nest: A nest of tensors of any numeric dtype.
        group: The replicas that take part; None for all.

    Returns:
        The nest of sums, equal on all replicas.

    Raises:
        ConfigurationError: A dtype has no sum.

    Example:
        >>> tfrep.all_sum(tf.constant([1.0, 2.0])).numpy().tolist()  # no strategy: one replica
        [1.0, 2.0]
    """
    return all_reduce(nest, "sum", group=group)


def all_mean(nest: Nest, *, group: ReplicaGroup | None = None) -> Nest:
    """Averages each tensor over the replicas: `all_reduce(nest, "mean")`.

    Args:
        nest: A nest of tensors of any numeric dtype.
        group: The replicas that take part; None for all.

    Returns:
        The nest of means, equal on all replicas.

    Raises:
        ConfigurationError: A dtype has no mean.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.all_mean(tf.cast(tfrep.replica_id(), tf.float32))
        >>> float(strategy.experimental_local_results(strategy.run(step))[0])
        0.5
    """
    return all_reduce(nest, "mean", group=group)


def reduce_scatter(nest: Nest, op: str = "sum", *, group: ReplicaGroup | None = None) -> Nest:
    """Reduces each tensor over the replicas, and gives replica r the r-th part of its rows.

    Args:
        nest: A nest of tensors of shape `[rows, ...]`, the same on all replicas.
        op: As for `all_reduce`.
        group: The replicas that take part; None for all.

    Returns:
        A nest of tensors of shape `[part, ...]`. The first `rows % num_replicas` parts have one row more than the others.

    Raises:
        ConfigurationError: `op` is unknown, a dtype does not support it, or a tensor is a scalar.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.reduce_scatter(tf.constant([1, 2, 3]))
        >>> [v.numpy().tolist() for v in strategy.experimental_local_results(strategy.run(step))]
        [[2, 4], [6]]
    """

    def check(tensor: tf.Tensor) -> None:
        check_op(op, tensor)
        check_rows("reduce_scatter", tensor)

    def reduce(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        own = flow.communicator.rank, flow.communicator.size
        if op == "product" and any(t.dtype.is_complex for t in tensors):
            return [cut(product(flow, t), own[1], own[0]) for t in tensors]
        return [from_real(flow.reduce_scatter(to_real(t), op), t) for t in tensors]

    return launch("reduce_scatter", nest, group, reduce, check=check, op=op)
