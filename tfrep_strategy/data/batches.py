"""Functions on one batch: counting its examples, cutting it into a part for each replica, and joining the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.step import Shards
from tfrep_strategy.core.tf import is_none, regroup
from tfrep_strategy.errors import warn


def known_examples(batch: Any) -> int | None:
    """Returns the number of examples of a batch, if the batch or its specification has it, and some tensor has rows."""
    with_rows = [leaf for leaf in tf.nest.flatten(batch) if not is_nothing(leaf) and leaf.shape.rank != 0]
    is_dense = bool(with_rows) and isinstance(with_rows[0], (tf.Tensor, tf.TensorSpec)) and with_rows[0].dtype != tf.variant
    return with_rows[0].shape[0] if is_dense and with_rows[0].shape.rank else None


def num_examples(batch: Any) -> tf.Tensor:
    """Counts the examples of a batch.

    Args:
        batch: A nest of dense, sparse or ragged tensors whose first dimension is the batch.

    Returns:
        int64 scalar: the first dimension of the first tensor that is not a scalar; 1 if all are scalars. A tensor of unknown
        rank counts as 1 if it turns out to be a scalar. A constant if the number is known.
    """
    if (known := known_examples(batch)) is not None:
        return tf.constant(known, tf.int64)
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if tf.is_tensor(leaf) and leaf.dtype != tf.variant and leaf.shape.rank != 0:
            shape = tf.shape(leaf, out_type=tf.int64)
            return shape[0] if leaf.shape.rank else tf.concat([shape, [1]], 0)[0]
    return tf.constant(1, tf.int64)


def known_total(parts: Sequence[Any], num_replicas: int) -> int | None:
    """Returns the number of examples of the global batch, if this process has all replicas and knows their numbers."""
    rows = [known for part in parts if (known := known_examples(part)) is not None]
    return sum(rows) if len(rows) == num_replicas else None


def is_nothing(leaf: Any) -> bool:
    """Returns whether a leaf of a batch, or its specification, stands for None. Keras represents it by an `Optional`."""
    return leaf is None or is_none(leaf) or isinstance(leaf, (tf.experimental.Optional, tf.OptionalSpec))


def as_tensors(batch: Any) -> Any:
    """Converts the arrays of a nest to tensors; None leaves are kept."""
    return tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)


def cut(batch: Any, num_parts: int, index: int, fits: bool | tf.Tensor | None = None) -> Any:
    """Takes one of `num_parts` contiguous parts of a batch.

    The first `size % num_parts` parts have one example more than the others; a part may be empty. If tensors have different
    numbers of rows (the nodes and edges of merged graphs, say), it is unknown which rows belong together. The first part is then
    the whole batch, and the others are empty.

    Args:
        batch: A nest of dense, sparse or ragged tensors whose first dimension is the batch. Every part gets a scalar whole.
        num_parts: Number of parts.
        index: Index of the part to take.
        fits: Whether the parts of all tensors belong together, if the caller knows; by default, if `has_one_size(batch)`.

    Returns:
        A nest of the same structure.

    Example:
        >>> [cut(tf.range(5), 3, i).numpy().tolist() for i in range(3)]
        [[0, 1], [2, 3], [4]]
        >>> [len(rows) for i in range(2) for rows in cut((tf.range(5), tf.range(3)), 2, i)]
        [5, 3, 0, 0]
    """
    if num_parts == 1:
        return batch
    cut_each = has_one_size(batch) if fits is None else fits

    def cut_leaf(leaf: Any) -> Any:
        rows = _num_rows(leaf)
        if rows is None:
            return leaf
        own, whole = bounds(rows, num_parts, index), bounds(rows, 1, 0) if index == 0 else (rows, rows)
        if isinstance(cut_each, bool):
            return _rows(leaf, *(own if cut_each else whole))
        return _rows(leaf, *tf.unstack(tf.where(cut_each, tf.stack(own), tf.stack(whole))))

    return tf.nest.map_structure(cut_leaf, batch)


def has_one_size(batch: Any) -> bool | tf.Tensor:
    """Returns whether all tensors of a batch have the same number of rows; a scalar tensor if only the run can tell.

    Scalars have no rows.

    Example:
        >>> has_one_size({"nodes": tf.zeros([5, 2]), "edges": tf.zeros([7, 2]), "rate": tf.constant(0.1)})
        False
    """
    sizes = [rows for leaf in tf.nest.flatten(batch) if (rows := _num_rows(leaf)) is not None]
    known = {rows for rows in sizes if isinstance(rows, int)}
    if len(known) > 1:
        return False
    if len(sizes) < 2 or all(isinstance(rows, int) for rows in sizes):
        return True
    all_sizes = tf.stack([tf.cast(rows, tf.int64) for rows in sizes])
    alike = tf.reduce_all(tf.equal(all_sizes, all_sizes[0]))
    return bool(alike) if tf.executing_eagerly() else alike


def all_alike(batches: Sequence[Any]) -> tf.Tensor:
    """Returns a bool scalar: whether the tensors of each of several batches have the same number of rows."""
    return tf.reduce_all([has_one_size(batch) for batch in batches])


def take_rows(batch: Any, start: Any, stop: Any) -> Any:
    """Returns the rows from `start` to before `stop` of a nest of dense, sparse or ragged tensors. All of them must have rows.

    A None leaf is kept.
    """
    return tf.nest.map_structure(lambda leaf: None if leaf is None else _rows(leaf, start, stop), batch)


def map_rows(function: Callable[..., Any], *batches: Any) -> Any:
    """Applies a function to leaves with rows, in batches of one structure. Other leaves, such as scalars, are those of the first.

    Example:
        >>> [part.numpy().tolist() for part in map_rows(lambda x: x[:2], (tf.range(5), tf.constant(0)))]
        [[0, 1], 0]
    """
    return tf.nest.map_structure(lambda leaf, *others: leaf if _num_rows(leaf) is None else function(leaf, *others), *batches)


def _num_rows(leaf: Any) -> Any:
    """Returns the number of rows of a tensor: an integer if known, else a scalar; None if it has no rows."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if not tf.is_tensor(leaf) or leaf.dtype == tf.variant or leaf.shape.rank == 0:
        return None
    rows = leaf.shape[0] if leaf.shape.rank else None
    return tf.shape(leaf)[0] if rows is None else rows


def _rows(leaf: Any, start: Any, stop: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
    rest = leaf.dense_shape[1:]
    part = tf.sparse.slice(leaf, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0))
    if leaf.shape.rank is None:
        return part
    # tf.sparse.slice loses the static dimensions.
    known = [part.dense_shape[i] if size is None else size for i, size in enumerate([None, *leaf.shape[1:]])]
    return tf.SparseTensor(part.indices, part.values, tf.stack(known))


def bounds(rows: Any, num_parts: int, index: int) -> tuple[Any, Any]:
    """Returns the first row of a part and the row after its last, as integers or as scalars of the dtype of `rows`."""
    base, longer = rows // num_parts, rows % num_parts

    def bound(i: int) -> Any:
        return i * base + (min(i, longer) if isinstance(rows, int) else tf.minimum(tf.cast(i, rows.dtype), longer))

    return bound(index), bound(index + 1)


def shard(batch: Any, num_replicas: int, first: int, count: int, fits: bool | None = None) -> Shards:
    """Cuts a global batch for the replicas `first` to `first + count - 1` of `num_replicas`.

    Args:
        batch: A batch, as for `cut`.
        num_replicas: Number of replicas.
        first: The first replica.
        count: Number of replicas to cut for.
        fits: Whether the parts of all tensors are known to belong together; by default, the batch determines it. If they do
            not, the process of replica 0 warns.
    """
    if fits is None and num_replicas > 1:
        fits = has_one_size(batch)
        if first == 0 and fits is not True:
            fits = _telling(fits)
    parts = tuple(cut(batch, num_replicas, first + i, fits) for i in range(count))
    return Shards(parts, num_examples(batch), all_alike([batch]))


def _telling(fits: bool | tf.Tensor) -> bool | tf.Tensor:
    """Returns whether the parts of all tensors belong together, and warns if they do not."""

    def tell() -> np.bool_:
        warn(
            "The tensors of a batch have different numbers of rows, so it cannot be split: each replica computes all of it.\n"
            "Hint: make batches whose tensors have one number of rows, or let each replica read its own"
            " (strategy.distribute_datasets_from_function).",
        )
        return np.bool_(False)

    if isinstance(fits, bool):
        tell()
        return fits
    return tf.ensure_shape(tf.cond(fits, lambda: tf.constant(True), lambda: tf.numpy_function(tell, [], tf.bool)), [])


def pack(shards: Shards) -> Any:
    """Turns the parts of a step into the value that `Strategy.run` passes to the replicas."""
    return shards.parts[0] if len(shards.parts) == 1 else regroup(shards.parts)


def with_unknown_size(part: Any) -> Any:
    """Hides a static batch size of 0 or 1 from the function that is being traced.

    Code that reads static sizes treats a dimension of 0 or 1 as a broadcast dimension. `keras.ops.add`, for example, takes a
    tensor of shape `[1, n]` for a bias.

    Args:
        part: A nest of dense, sparse or ragged tensors whose first dimension is the batch.

    Returns:
        The same nest. The first dimension of dense tensors is unknown if it was 0 or 1.
    """

    def hide(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.variant or not leaf.shape.rank or leaf.shape[0] not in (0, 1):
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return tf.nest.map_structure(hide, part)


def concatenate(parts: Sequence[Any]) -> Any:
    """Joins dense, sparse or ragged outputs of replicas along the batch; stacks scalars."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(list(parts), 0)


def empty_batch(spec: Any) -> Any:
    """Makes a batch without examples.

    Args:
        spec: A nest of `tf.TensorSpec`, `tf.SparseTensorSpec` or `tf.RaggedTensorSpec`.

    Returns:
        A nest of the same structure whose tensors have a first dimension of 0. Scalars are zero. A tensor of unknown rank is
        an empty vector.
    """

    def empty_leaf(leaf: Any) -> Any:
        if is_none(leaf):
            return None
        if isinstance(leaf, tf.OptionalSpec):  # Keras's `None` in a pipeline.
            return tf.experimental.Optional.empty(leaf._element_spec)
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = [0] + [d or 0 for d in leaf.shape[1:]] if leaf.shape.rank else [0]
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
        if _ragged_rank(leaf):
            values = tf.zeros([0] + [d or 0 for d in leaf.shape[1 + leaf.ragged_rank :]], leaf.dtype)
            return tf.RaggedTensor.from_nested_row_splits(
                values, [tf.zeros([1], leaf.row_splits_dtype)] * leaf.ragged_rank, validate=False
            )
        if leaf.shape.rank == 0:
            return tf.zeros([], leaf.dtype)
        return tf.zeros([0] + [d or 0 for d in leaf.shape[1:]] if leaf.shape.rank else [0], leaf.dtype)

    return tf.nest.map_structure(empty_leaf, spec)


def with_all_open(batch: Any) -> Any:
    """Returns the specification of a batch with open sizes in all dimensions of its dense tensors."""

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return None if leaf is None else tf.type_spec_from_value(leaf)
        return tf.TensorSpec([None] * leaf.shape.rank, leaf.dtype)

    return tf.nest.map_structure(opened, batch)


def has_open_sizes(spec: Any) -> bool:
    """Returns whether a specification has an open dimension other than the first, such as a sequence length, or an open rank."""
    return any(_open_dimensions(leaf) or _has_open_rank(leaf) for leaf in tf.nest.flatten(spec))


def open_sizes(spec: Any, batch: Any) -> tf.Tensor:
    """Returns the sizes of a batch in the open dimensions of its specification, as an int64 vector."""
    leaves = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
    sizes = [_shape(leaf)[i] for leaf, kind in leaves for i in _open_dimensions(kind)]
    return tf.stack(sizes) if sizes else tf.zeros([0], tf.int64)


def with_open_sizes(spec: Any, batch: Any, sizes: tf.Tensor) -> Any:
    """Pads a batch with zeros to given sizes in the open dimensions of its specification.

    Args:
        spec: A nest, as for `empty_batch`.
        batch: A batch of this kind.
        sizes: The result of `open_sizes` for a batch with these sizes.

    Example:
        >>> with_open_sizes(tf.TensorSpec([None, None]), tf.ones([1, 2]), [3]).numpy().tolist()
        [[1.0, 1.0, 0.0]]
    """
    left = iter(tf.unstack(sizes, len([i for leaf in tf.nest.flatten(spec) for i in _open_dimensions(leaf)])))

    def resized(leaf: Any, kind: Any) -> Any:
        opened = _open_dimensions(kind)
        if not opened:
            return leaf
        known, has = kind.shape[_ragged_rank(kind) + 1 :], _shape(leaf)
        shape = tf.stack([has[0], *(tf.cast(next(left) if size is None else size, tf.int64) for size in known)])
        if isinstance(leaf, tf.SparseTensor):
            return tf.SparseTensor(leaf.indices, leaf.values, shape)
        paddings = tf.stack([tf.zeros_like(has), shape - has], 1)
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.with_flat_values(tf.pad(leaf.flat_values, paddings))
        return tf.ensure_shape(tf.pad(leaf, paddings), [leaf.shape[0], *kind.shape[1:]])

    return tf.nest.map_structure(resized, batch, spec)


def _open_dimensions(leaf: Any) -> list[int]:
    """Returns the open dimensions, except the first, of a tensor, or of the flat values of a ragged one."""
    if is_nothing(leaf) or leaf.dtype == tf.variant or leaf.shape.rank is None:
        return []
    return [i for i, size in enumerate(leaf.shape[_ragged_rank(leaf) :]) if i and size is None]


def _has_open_rank(leaf: Any) -> bool:
    return not is_nothing(leaf) and leaf.shape.rank is None


def _ragged_rank(leaf: Any) -> int:
    return leaf.ragged_rank if isinstance(leaf, tf.RaggedTensorSpec) else 0


def _shape(leaf: Any) -> Any:
    """Returns the shape of a tensor, or of the flat values of a ragged one, as an int64 vector."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape
    return tf.shape(leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf, out_type=tf.int64)


def any_size(spec: Any) -> Any:
    """Returns a specification of batches with any number of examples, given one with a fixed number."""

    def any_leaf(leaf: Any) -> Any:
        if is_nothing(leaf) or not leaf.shape.rank:
            return leaf
        shape = [None, *leaf.shape[1:]]
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        return type(leaf)(shape, leaf.dtype)

    return tf.nest.map_structure(any_leaf, spec)


def as_element(spec: Any, components: Sequence[Any]) -> Any:
    """Rebuilds an element from the arguments of `tf.data.Dataset.map`, which passes the items of a tuple separately."""
    return tuple(components) if type(spec) is tuple else components[0]


def in_turn(dataset: tf.data.Dataset, pieces_of: Callable[[Any], Sequence[Any]]) -> tf.data.Dataset:
    """Replaces each element of a data set by the elements in the list `pieces_of(element)`."""
    spec = dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def pieces(*components: Any) -> tf.data.Dataset:
        datasets = [tf.data.Dataset.from_tensors(piece) for piece in pieces_of(as_element(spec, components))]
        joined = datasets[0]
        for dataset in datasets[1:]:
            joined = joined.concatenate(dataset)
        return joined

    return dataset.flat_map(pieces)
