"""Whether a map of batches may run on a part of their rows, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import dataset_kinds as kinds
from tfrep_strategy._tensorflow import is_none, parts_of_dataset
from tfrep_strategy.batches import any_size
from tfrep_strategy.partitioner.exact_rows import operation_that_mixes_rows
from tfrep_strategy.pipelines.functions import are_alike, first_stateful_operation, resources

COUNTING = (kinds.Take, kinds.Skip, kinds.Repeat)
"""Operations that look at nothing but the number of elements."""

_IN_ORDER = (kinds.Options, kinds.Prefetch, *COUNTING)
_SAME_ELEMENTS = (*_IN_ORDER, kinds.Cache, kinds.Shuffle)
"""Operations whose elements are those below, in their order and maybe in another one."""


def of_any_size(dataset: Any) -> tuple[Any, str | None]:
    """Returns a map of batches as it runs on a part of their rows, or why it has to get whole batches.

    Args:
        dataset: A data set that maps batches. What a zipped one repeats without an end is no batch: each part gets it whole.

    Returns:
        The same map, traced for any number of rows, and None; or None, and an operation that may mix rows or another reason.
    """
    if not hasattr(dataset, "_of_any_size"):  # To trace the user's function again takes time.
        dataset._of_any_size = _found_of_any_size(dataset)
    found: tuple[Any, str | None] = dataset._of_any_size
    return found


def _found_of_any_size(dataset: Any) -> tuple[Any, str | None]:
    function, below = dataset._map_func.function, _side_by_side(dataset._input_dataset)
    found = first_stateful_operation(function) or changed_below(dataset)
    if found is not None:
        return None, found
    for spec in tf.nest.flatten((dataset._input_dataset.element_spec, dataset.element_spec)):
        if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.variant or spec.shape.rank is None:
            return None, "sparse or ragged values, or an unknown number of dimensions"
    unsized = dataset if all(map(_has_any_size, below)) else _unsized(dataset, below)
    if unsized is None:
        return None, "it knows the size of its batches"
    given = [(leaf, leaf.shape.rank != 0 and not is_same_in_every_step(part)) for part in below for leaf in _leaves(part)]
    sizes = [leaf.shape[0] for leaf, is_cut in given if is_cut]
    if len(set(sizes)) > 1 or len(sizes) > 1 and sizes[0] is None and _rows_of(dataset._input_dataset) is None:
        return None, "tensors that may have different numbers of rows"
    mixing = operation_that_mixes_rows(unsized._map_func.function, [is_cut for _, is_cut in given])
    return (unsized, None) if mixing is None else (None, mixing)


def _unsized(dataset: Any, below: list[Any]) -> Any:
    """Returns a map of batches that all have one size, traced for any size; None if that would be another function."""

    def unsized(part: Any) -> Any:
        variant = tf.data.experimental.to_variant(part)
        return part if _has_any_size(part) else tf.data.experimental.from_variant(variant, any_size(part.element_spec))

    parts, zipped = list(map(unsized, below)), dataset._input_dataset
    source = tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped._datasets, parts)) if isinstance(zipped, kinds.Zip) else parts[0]
    try:
        again = source.map(dataset._map_func._func)
    except Exception:  # Of the user's function, which may raise anything when it does not get the size that it expects.
        return None
    return again if are_alike(dataset._map_func.function, again._map_func.function) else None


def _rows_of(dataset: Any) -> Any:
    """Returns what decides how many rows all tensors of a batch have; None if nothing is known to."""
    if isinstance(dataset, (kinds.Batch, kinds.ParallelBatch)):
        drops = bool(dataset._drop_remainder)
        return int(dataset._batch_size), None if drops else int(dataset._input_dataset.cardinality())
    if isinstance(dataset, _IN_ORDER):
        return _rows_of(dataset._input_dataset)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return _rows_of(dataset._input_dataset) if of_any_size(dataset)[1] is None else None
    if isinstance(dataset, kinds.Zip):
        return _common_rows([part for part in dataset._inputs() if not is_same_in_every_step(part)])
    return None


def _common_rows(datasets: Sequence[Any]) -> Any:
    """Returns what decides how many rows the batches of several data sets have, if it is the same for all, and is known."""
    found = {_rows_of(dataset) for dataset in datasets}
    rows = found.pop() if len(found) == 1 else None
    return None if rows is None or rows[1] == tf.data.UNKNOWN_CARDINALITY else rows


def parts_fit(dataset: Any, num_parts: int) -> bool:
    """Returns whether each tensor of a batch may be cut by its own rows, as far as the pipeline tells.

    It may if all have one number of rows, or if they were batched apart (labeled and unlabeled examples, say) and the parts of
    each are equally large.
    """
    if len(_leaves(dataset)) == 1 or _has_known_rows(dataset.element_spec):
        return True
    if isinstance(dataset, _SAME_ELEMENTS):
        return parts_fit(dataset._input_dataset, num_parts)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return of_any_size(dataset)[1] is None
    if isinstance(dataset, kinds.Zip):
        parts = list(filter(has_rows, dataset._inputs()))
        together = len(parts) < 2 or _common_rows(parts) is not None or all(_divides(part, num_parts) for part in parts)
        return together and all(parts_fit(part, num_parts) for part in parts)
    return isinstance(dataset, (kinds.Batch, kinds.PaddedBatch, kinds.ParallelBatch))


def rows_are_alike(dataset: Any) -> bool:
    """Returns whether all tensors of a batch that are no scalars have one number of rows, as far as the pipeline tells."""
    if sum(not is_none(leaf) and leaf.shape.rank != 0 for leaf in _leaves(dataset)) == 1 or _has_known_rows(dataset.element_spec):
        return True
    if isinstance(dataset, _SAME_ELEMENTS):
        return rows_are_alike(dataset._input_dataset)
    if isinstance(dataset, (kinds.Map, kinds.ParallelMap)):
        return of_any_size(dataset)[1] is None
    if isinstance(dataset, kinds.Zip):
        return _common_rows(dataset._inputs()) is not None and all(map(rows_are_alike, dataset._inputs()))
    return isinstance(dataset, (kinds.Batch, kinds.PaddedBatch, kinds.ParallelBatch))


def _has_known_rows(spec: Any) -> bool:
    """Returns whether all tensors have the same number of rows in each batch."""
    leaves = tf.nest.flatten(spec)
    rows = {leaf.shape[0] if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank else None for leaf in leaves}
    return len(rows) == 1 and None not in rows


def _divides(dataset: Any, num_parts: int) -> bool:
    """Returns whether all batches of a data set are known to have equally large parts."""
    size, rows = _rows_of(dataset) or (1, None)
    last = 0 if rows in (None, tf.data.INFINITE_CARDINALITY) else rows % size
    return rows != tf.data.UNKNOWN_CARDINALITY and size % num_parts == last % num_parts == 0


def _has_any_size(dataset: Any) -> bool:
    return is_same_in_every_step(dataset) or dataset.element_spec == any_size(dataset.element_spec)


def _side_by_side(dataset: Any) -> list[Any]:
    return list(dataset._inputs()) if isinstance(dataset, kinds.Zip) else [dataset]


def _leaves(dataset: Any) -> list[Any]:
    return tf.nest.flatten(dataset.element_spec)


def changed_below(dataset: Any) -> str | None:
    """Returns an operation below a map that changes what the map reads: how far it is ahead must not depend on the cut."""
    used = resources(dataset._map_func.function)
    below = [each.function for part in parts_of_dataset(dataset._input_dataset) for each in part._functions()] if used else []
    return next((found for each in below if used & resources(each) and (found := first_stateful_operation(each))), None)


def has_rows(dataset: tf.data.Dataset) -> bool:
    """Returns whether the batches of a data set have a tensor that is no scalar."""
    shapes = [getattr(leaf, "shape", None) for leaf in _leaves(dataset)]
    return any(shape is not None and shape.rank != 0 for shape in shapes)


def is_same_in_every_step(dataset: Any) -> bool:
    """Returns whether a data set repeats one element, so that each step has the same."""
    return isinstance(dataset, kinds.Repeat) and isinstance(dataset._input_dataset, kinds.Tensor)
