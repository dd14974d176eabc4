"""Collectives that reduce tensors over the replicas: `all_reduce`, `all_sum`, `all_mean`, `reduce_scatter`."""

from __future__ import annotations

import tensorflow as tf

from tfrep_strategy.batches import cut
from tfrep_strategy.collectives.calls import Nest, launch
from tfrep_strategy.collectives.checks import check_op, check_rows
from tfrep_strategy.collectives.dtypes import from_real, product, to_real
from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.strategies.groups import ReplicaGroup


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
    """Reduces each tensor over the replicas, and leaves replica r the r-th part of its rows.

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
