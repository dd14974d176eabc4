"""`map_gather` and `map_reduce`, which map a function over items that are spread over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.base import mean_of_sum
from tfrep_strategy.core.tf import converted_by_autograph
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.training.collectives.calls import Nest, check_op, flow_of
from tfrep_strategy.training.collectives.operations import all_gather, all_reduce

_IDENTITY = {"sum": 0, "product": 1}


class Spread:
    """The items of one `map_gather` or `map_reduce`. Replica r has the items r, r + size, ...

    Args:
        fn: Takes an item and returns a nest of tensors.
        items: All items.
        rank: The id of this replica, or its position in a group.
        size: Number of replicas that share the work.

    Raises:
        ConfigurationError: `fn` returns nests of different structures or dtypes.
    """

    def __init__(self, fn: Callable[[Any], Nest], items: Sequence[Any], rank: Any, size: int) -> None:
        if not isinstance(rank, int):
            raise ConfigurationError(
                "map_gather and map_reduce need a replica id that is known while the step is traced.\n"
                "Hint: use a MirroredStrategy or a MultiWorkerStrategy."
            )
        self._fn, self._items = fn if tf.executing_eagerly() else converted_by_autograph(fn), items
        self._owners = [i % size for i in range(len(items))]
        self._rank, self._size = rank, size
        # A replica needs the shapes of the other replicas' results. Tracing finds them without running anything.
        self.specs = [tf.function(lambda item=item: self._tensors(item)).get_concrete_function().structured_outputs
                      for item in items]  # fmt: skip
        first = tf.nest.map_structure(lambda s: s.dtype, self.specs[0])
        for i, spec in enumerate(self.specs):
            if tf.nest.map_structure(lambda s: s.dtype, spec) != first:
                raise ConfigurationError(
                    message(
                        f"Items 0 and {i} gave nests of different structures or dtypes.",
                        hint="have the function return the same structure for every item; tf.cast gives results one dtype.",
                        item_0=self.specs[0],
                        **{f"item_{i}": spec},
                    )
                )

    def _tensors(self, item: Any) -> Nest:
        return tf.nest.map_structure(tf.convert_to_tensor, self._fn(item))

    def own(self) -> list[Nest]:
        """Computes this replica's items."""
        return [self._tensors(item) for item, owner in zip(self._items, self._owners, strict=True) if owner == self._rank]

    def _nothing_of_first(self) -> list[tf.Tensor]:
        """Returns no rows of the first item's results, so that gradients flow even on a replica without items."""
        return [tensor[tf.newaxis][:0] for tensor in tf.nest.flatten(self._tensors(self._items[0]))]

    def gather(self, all_gather: Callable[[Nest], Nest]) -> list[Nest]:
        """Returns the results of all items, in order. Runs one collective for each tensor of the nest, and one for shapes."""
        own = [tf.nest.flatten(nest) for nest in self.own()]
        flat_specs = [tf.nest.flatten(spec) for spec in self.specs]
        parts = own or [self._nothing_of_first()]
        columns = [all_gather(tf.concat([tf.reshape(t, [-1]) for t in column], 0)) for column in zip(*parts, strict=True)]
        shapes = self._shapes(own, flat_specs, all_gather)
        order = sorted(range(len(self._items)), key=lambda i: (self._owners[i], i))
        results: list[list[Any]] = [[] for _ in self._items]
        for j, column in enumerate(columns):
            sizes = [tf.reduce_prod(shapes[i][j]) for i in order]
            for i, piece in zip(order, tf.split(column, tf.stack(sizes)), strict=True):
                results[i].append(tf.ensure_shape(tf.reshape(piece, shapes[i][j]), flat_specs[i][j].shape))
        return [tf.nest.pack_sequence_as(spec, flat) for spec, flat in zip(self.specs, results, strict=True)]

    def _shapes(self, own: Any, flat_specs: Any, all_gather: Callable[[Nest], Nest]) -> list[list[Any]]:
        if all(spec.shape.is_fully_defined() for specs in flat_specs for spec in specs):
            return [[tf.constant(spec.shape.as_list(), tf.int32) for spec in specs] for specs in flat_specs]
        mine = [tf.shape(tensor) for nest in own for tensor in nest]
        everyone = all_gather(tf.concat(mine, 0) if mine else tf.zeros([0], tf.int32))
        shapes: list[list[Any]] = [[] for _ in flat_specs]
        start = 0
        for i in sorted(range(len(flat_specs)), key=lambda i: (self._owners[i], i)):
            for spec in flat_specs[i]:
                shapes[i].append(everyone[start : start + spec.shape.rank])
                start += spec.shape.rank
        return shapes

    def reduce(self, op: str, all_reduce: Callable[[Nest, str], Nest]) -> Nest:
        """Reduces the results of all items: first on each replica, then over the replicas."""
        own = self.own()
        if op != "mean":
            return all_reduce(reduce_nests(own, op) if own else self._nothing(op), op)
        wide = [tf.nest.map_structure(_wide, nest) for nest in own or [self._nothing("sum")]]
        total = all_reduce(reduce_nests(wide, "sum"), "sum")
        return tf.nest.map_structure(lambda t, spec: tf.cast(mean_of_sum(t, len(self._items)), spec.dtype), total, self.specs[0])

    def has_static_shapes(self) -> bool:
        """Returns whether all results have the same shape, and it is known before they are computed."""
        return all(
            s.shape.is_fully_defined() and s.shape == first.shape
            for spec in self.specs
            for s, first in zip(tf.nest.flatten(spec), tf.nest.flatten(self.specs[0]), strict=True)
        )

    def _nothing(self, op: str) -> Nest:
        def identity(spec: tf.TensorSpec) -> tf.Tensor:
            if spec.dtype.is_bool:
                return tf.fill(spec.shape, op == "min")
            value: Any = _IDENTITY.get(op)
            if value is None:
                lowest = -float("inf") if spec.dtype.is_floating else spec.dtype.min
                highest = float("inf") if spec.dtype.is_floating else spec.dtype.max
                value = highest if op == "min" else lowest
            return tf.fill(spec.shape, tf.cast(value, spec.dtype))

        specs = tf.nest.flatten(self.specs[0])
        flat = [
            tf.concat([identity(spec)[tf.newaxis], nothing], 0)[0]
            for spec, nothing in zip(specs, self._nothing_of_first(), strict=True)
        ]
        return tf.nest.pack_sequence_as(self.specs[0], flat)


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """Casts integers of few bits, because their sum may overflow where their mean does not."""
    return tf.cast(tensor, tf.int64) if tensor.dtype.is_integer and tensor.dtype.size < tf.int64.size else tensor


def reduce_nests(nests: Sequence[Nest], op: str) -> Nest:
    """Reduces nests of the same structure, tensor by tensor."""

    def reduce(*tensors: tf.Tensor) -> tf.Tensor:
        stacked = tf.stack(tensors)
        if stacked.dtype.is_bool:
            return (tf.reduce_all if op == "min" else tf.reduce_any)(stacked, 0)
        reductions = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "min": tf.reduce_min, "max": tf.reduce_max,
                      "product": tf.reduce_prod}  # fmt: skip
        return reductions[op](stacked, 0)

    return tf.nest.map_structure(reduce, *nests)


def map_gather(fn: Callable[[Any], Nest], items: Any, *, group: ReplicaGroup | None = None) -> list[Nest]:
    """Spreads items over the replicas, and returns all results on every replica.

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
    """Spreads items over the replicas, and returns the reduction of all results on every replica.

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
