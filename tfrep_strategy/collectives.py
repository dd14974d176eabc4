"""MPI-like collectives between replicas, callable inside a step: nest in, nest out, and gradients flow through them.

All replicas call the same collectives in the same order, with nests of the same structure, dtypes and (but for what is
said at `all_gather` and `all_to_all`) shapes. Pass a dict as one nest; do not loop over it. Outside a step, and under no
strategy, each gives the answer of a replica that is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy import data
from tfrep_strategy._collectives import checks, dtypes
from tfrep_strategy._collectives.flow import Flow
from tfrep_strategy._collectives.spread_work import Spread, reduce_nests
from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.communicators.context import ContextCommunicator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.strategies.groups import ReplicaGroup

Nest = Any


# Reductions.


def all_reduce(nest: Nest, op: str = "sum", *, group: ReplicaGroup | None = None) -> Nest:
    """Reduces each tensor over the replicas.

    Args:
        nest: Of tensors, of any numeric dtype or bool; the same shapes on all replicas.
        op: `"sum"`, `"mean"` (integers are rounded towards zero), `"min"`, `"max"` or `"product"`. Of bool: `"min"` (all)
            and `"max"` (any). Of complex: not `"min"`, `"max"`.
        group: Only these replicas take part.

    Returns:
        The nest reduced, of the same structure, shapes and dtypes, equal on all replicas.

    Raises:
        ConfigurationError: for an unknown `op`, or one that a dtype cannot do.
        DesyncError: when replicas pass nests of different structures.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.all_reduce({"a": tfrep.replica_id() + 1.0}, "max")["a"]
        >>> [float(v) for v in strategy.experimental_local_results(strategy.run(step))]
        [2.0, 2.0]
    """
    def reduce(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if op == "product" and any(t.dtype.is_complex for t in tensors):
            return [dtypes.product(flow, t) for t in tensors]
        reduced = flow.all_reduce([dtypes.to_real(t) for t in tensors], op)
        return [dtypes.from_real(r, t) for r, t in zip(reduced, tensors, strict=True)]

    return _launch("all_reduce", nest, group, reduce, check=lambda t: checks.check_op(op, t), op=op)


def all_sum(nest: Nest, *, group: ReplicaGroup | None = None) -> Nest:
    """Sums each tensor over the replicas: `all_reduce(nest, "sum")`.

    Args:
        nest: Of tensors of any numeric dtype.
        group: Only these replicas take part.

    Returns:
        The nest of sums, equal on all replicas.

    Raises:
        ConfigurationError: for a dtype that has no sum.

    Example:
        >>> tfrep.all_sum(tf.constant([1.0, 2.0])).numpy().tolist()  # no strategy: one replica
        [1.0, 2.0]
    """
    return all_reduce(nest, "sum", group=group)


def all_mean(nest: Nest, *, group: ReplicaGroup | None = None) -> Nest:
    """Averages each tensor over the replicas: `all_reduce(nest, "mean")`.

    Args:
        nest: Of tensors of any numeric dtype.
        group: Only these replicas take part.

    Returns:
        The nest of means, equal on all replicas.

    Raises:
        ConfigurationError: for a dtype that has no mean.

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
        nest: Of tensors of shape `[rows, ...]`, the same on all replicas.
        op: As for `all_reduce`.
        group: Only these replicas take part.

    Returns:
        A nest of tensors of shape `[part, ...]`; the first `rows % num_replicas` parts have one row more than the others.

    Raises:
        ConfigurationError: for an unknown `op`, one that a dtype cannot do, or a scalar.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     return tfrep.reduce_scatter(tf.constant([1, 2, 3]))
        >>> [v.numpy().tolist() for v in strategy.experimental_local_results(strategy.run(step))]
        [[2, 4], [6]]
    """
    def check(tensor: tf.Tensor) -> None:
        checks.check_op(op, tensor)
        checks.check_rows("reduce_scatter", tensor)

    def reduce(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        own = flow.communicator.rank, flow.communicator.size
        if op == "product" and any(t.dtype.is_complex for t in tensors):
            return [data.cut(dtypes.product(flow, t), own[1], own[0]) for t in tensors]
        return [dtypes.from_real(flow.reduce_scatter(dtypes.to_real(t), op), t) for t in tensors]

    return _launch("reduce_scatter", nest, group, reduce, check=check, op=op)


# What is moved.


def all_gather(nest: Nest, axis: int = 0, stack: bool = False, *, group: ReplicaGroup | None = None) -> Nest:
    """Gives every replica the tensors of all, joined in replica order.

    Args:
        nest: Of tensors of any dtype, string included. The sizes along `axis` may differ between replicas.
        axis: Dimension along which they are joined.
        stack: Joins along a new dimension `axis` instead; the shapes are then equal on all replicas.
        group: Only these replicas take part.

    Returns:
        A nest of the same structure.

    Raises:
        ConfigurationError: for an axis that a tensor does not have.
        DesyncError: when dimensions other than `axis` differ.

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
            raise ConfigurationError(message("A tensor does not have that axis.", hint=hint, axis=axis, shape=tensor.shape))

    def gather(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [dtypes.gather_along(flow, tf.expand_dims(t, axis) if stack else t, axis) for t in tensors]

    return _launch("all_gather", nest, group, gather, check=check, axis=axis, stack=stack)


def broadcast(nest: Nest, source: int = 0, *, group: ReplicaGroup | None = None) -> Nest:
    """Gives every replica the tensors of one.

    Args:
        nest: Of tensors of any dtype, string included; the same shapes on all replicas.
        source: Replica id of the sender (also with a group: the id in the strategy).
        group: Only these replicas take part.

    Returns:
        The source's nest. Its gradient arrives at the source.

    Raises:
        ConfigurationError: when no such replica exists, or it is not in the group.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> [int(v) for v in strategy.run(lambda: tfrep.broadcast(tfrep.replica_id() + 5, 1)).values]
        [6, 6]
    """

    def send(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        root = checks.check_source(source, group, flow.communicator.size)
        real = [dtypes.to_real(t) for t in tensors if t.dtype != tf.string]
        sent = iter(flow.broadcast(real, root)) if real else iter([])
        return [
            dtypes.broadcast_strings(flow, t, root) if t.dtype == tf.string else dtypes.from_real(next(sent), t) for t in tensors
        ]

    return _launch("broadcast", nest, group, send, source=source)


def all_to_all(nest: Nest, splits: Any = None, *, group: ReplicaGroup | None = None) -> Nest:
    """Sends a part of the rows to each replica, and receives what each has sent to this one.

    Args:
        nest: Of tensors of shape `[rows, ...]` of any dtype, string included.
        splits: int32 of shape `[num_replicas]`: how many rows go to each replica; they add up to `rows`. Default: equal
            parts.
        group: Only these replicas take part.

    Returns:
        A nest of the rows received, in replica order; with `splits`, a pair of that and of how many came from each (int32
        of shape `[num_replicas]`).

    Raises:
        ConfigurationError: for a scalar, splits of another length, or rows that do not divide.

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
        outside = group is not None and size < len(group)  # Keeps its own.
        result = []
        for tensor in tensors:
            if outside or splits is None:
                own = _even_splits(tensor, size)
            else:
                own = _to_splits(splits, size)
            rows, received = dtypes.all_to_all(flow, tensor, own)
            counts[:] = [tf.zeros([len(group)], tf.int32) if outside and group is not None else received]
            result.append(rows)
        return result

    rows = _launch("all_to_all", nest, group, exchange, check=lambda t: checks.check_rows("all_to_all", t))
    return rows if splits is None else (rows, counts[0])


# Work that is spread.


def map_gather(fn: Callable[[Any], Nest], items: Sequence[Any], *, group: ReplicaGroup | None = None) -> list[Nest]:
    """Spreads items over the replicas, and gives every replica the results of all.

    Args:
        fn: Makes a nest of tensors of one item; of the same structure and dtypes for every item, the shapes may differ. It
            calls no collectives.
        items: The same list on all replicas; anything that `fn` takes. Replica r computes items r, r + num_replicas, ...
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
    if not items:
        return []
    communicator = _flow(group).communicator
    spread = Spread(fn, items, communicator.rank, communicator.size)
    return spread.gather(lambda nest: all_gather(nest, group=group))


def map_reduce(
    fn: Callable[[Any], Nest], items: Sequence[Any], op: str = "sum", *, group: ReplicaGroup | None = None
) -> Nest:
    """Spreads items over the replicas, and gives every replica the reduction of the results.

    Args:
        fn: Makes a nest of tensors of one item; of the same structure, dtypes and shapes for every item. It calls no
            collectives.
        items: The same list on all replicas, not empty; anything that `fn` takes.
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
    if not items:
        raise ConfigurationError(message("map_reduce needs at least one item.", items=items))
    communicator = _flow(group).communicator
    spread = Spread(fn, items, communicator.rank, communicator.size)
    for spec in tf.nest.flatten(spread.specs[0]):
        checks.check_op(op, spec)
    if spread.has_static_shapes():
        return spread.reduce(op, lambda nest, op: all_reduce(nest, op, group=group))
    return reduce_nests(spread.gather(lambda nest: all_gather(nest, group=group)), op)


# Who is where.


def replica_id() -> Any:
    """Returns the number of this replica, 0 to `num_replicas() - 1`; 0 outside a step.

    Returns:
        An int; under strategies of TensorFlow that number replicas at run time, an int32 scalar.

    Example:
        >>> tfrep.replica_id()
        0
    """
    return checks.replica_id()


def num_replicas(group: ReplicaGroup | None = None) -> int:
    """Returns how many replicas run this step together; 1 outside a step.

    Args:
        group: Counts its members instead.

    Example:
        >>> tfrep.num_replicas()
        1
    """
    if group is not None:
        return len(group)
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def barrier(*, group: ReplicaGroup | None = None) -> None:
    """Waits until every replica has called it: inside a step the replicas, outside a step the processes.

    Args:
        group: Only these replicas take part; inside a step.

    Example:
        >>> tfrep.barrier()
    """
    strategy = _strategy_outside_step()
    if strategy is not None:
        strategy.barrier()
        return

    def wait(flow: Flow, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # What comes back is used by an operation that a function has to run.
        for total in flow.all_reduce(tensors, "sum"):
            tf.debugging.assert_greater(total, 0)
        return tensors

    _launch("barrier", tf.ones([], tf.int32), group, wait)


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Gives every process one process's Python object; outside a step, with the strategy in scope.

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
    _check_no_step("broadcast_object")
    communicator = _process_communicator()
    communicator.check_root(source)
    return communicator.broadcast_object(value, source)


def all_gather_object(value: Any) -> list[Any]:
    """Gives every process the Python objects of all; outside a step, with the strategy in scope.

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
    _check_no_step("all_gather_object")
    return _process_communicator().all_gather_object(value)


# How every collective starts.


def _launch(
    kind: str,
    nest: Nest,
    group: ReplicaGroup | None,
    work: Callable[[Flow, list[tf.Tensor]], list[tf.Tensor]],
    check: Callable[[tf.Tensor], None] = lambda tensor: None,
    **options: Any,
) -> Nest:
    """Runs one collective; all of them pass through here.

    Args:
        kind: Its name.
        nest: What this replica brings.
        group: Who takes part.
        work: Does it: from this replica's flow and tensors to the resulting tensors.
        check: Refuses a tensor that the collective cannot take.
        **options: What else all replicas have to agree on.

    Returns:
        The result, in the structure of `nest`.
    """
    tensors = [checks.to_tensor(kind, leaf) for leaf in tf.nest.flatten(nest)]
    flow = _flow(group)
    try:
        for tensor in tensors:
            check(tensor)
    except ConfigurationError as error:
        raise ConfigurationError(f"{kind} on replica {replica_id()}: {error}") from None
    if hasattr(flow.communicator, "compare"):
        call = checks.describe(kind, options, nest, tensors)
        flow.communicator.compare((replica_id(), call, tensors), checks.check_equal)
    return tf.nest.pack_sequence_as(nest, work(flow, tensors) if tensors else [])


def _flow(group: ReplicaGroup | None) -> Flow:
    context = tf.distribute.get_replica_context()
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ConfigurationError(
            message(
                "Under a ParameterServerStrategy the workers do not wait for each other, so that they cannot talk.",
                hint="use a MirroredStrategy or a MultiWorkerStrategy for collectives.",
                strategy=type(strategy).__name__,
            )
        )
    if group is not None and not isinstance(group, ReplicaGroup):
        raise ConfigurationError(message("Not a group.", hint="make one by strategy.new_group([0, 2]).", group=group))
    if context is None or (context.num_replicas_in_sync == 1 and not hasattr(strategy, "communicator_of")):
        return Flow(SingleCommunicator(), None)
    if group is not None and group.strategy is not strategy:
        raise ConfigurationError(message("The group belongs to another strategy.", group=group))
    replica = checks.replica_id()
    communicator: Communicator
    if group is not None:
        communicator = group.communicator_of(replica)
    elif hasattr(strategy, "communicator_of"):
        communicator = strategy.communicator_of(replica)
    else:
        communicator = ContextCommunicator(context)
    return Flow(communicator, current_step())


def _strategy_outside_step() -> Any:
    """The strategy in scope, if it is one of this package and the caller is not inside a replica."""
    strategy = tf.distribute.get_strategy()
    outside = tf.distribute.get_replica_context() is None
    return strategy if outside and hasattr(strategy, "communicator_of") else None


def _process_communicator() -> Communicator:
    return getattr(_strategy_outside_step(), "communicator", None) or SingleCommunicator()


def _check_no_step(kind: str) -> None:
    if not tf.executing_eagerly() or (tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None):
        raise ConfigurationError(f"{kind} was called inside a step.\nHint: objects are for what happens once, outside it.")


def _even_splits(tensor: tf.Tensor, size: int) -> tf.Tensor:
    rows = tensor.shape[0]
    if rows is not None and rows % size:
        raise ConfigurationError(
            message(
                f"all_to_all on replica {checks.replica_id()}: the rows do not divide among {size} replicas.",
                hint="give splits.",
                shape=tensor.shape,
            )
        )
    count = tf.shape(tensor)[0]
    tf.debugging.assert_equal(count % size, 0, "all_to_all: the rows do not divide among the replicas; give splits.")
    return tf.fill([size], count // size)


def _to_splits(splits: Any, size: int) -> tf.Tensor:
    own = tf.convert_to_tensor(splits, tf.int32)
    if own.shape.rank != 1 or own.shape[0] not in (None, size):
        raise ConfigurationError(
            message(
                f"all_to_all on replica {checks.replica_id()}: one number of rows is needed for each replica.",
                splits=splits,
                num_replicas=size,
            )
        )
    return tf.ensure_shape(own, [size])
