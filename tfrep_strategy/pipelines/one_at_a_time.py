"""Maps whose calls draw random numbers, or change something: called one after the other, so that all processes get the same.

TensorFlow gives the numbers of one generator to the calls of a map as they come. With several calls at once (`num_parallel_calls`)
each process would give an example other numbers. With one call at a time they are those of `num_parallel_calls=None`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import dataset_kinds as kinds
from tfrep_strategy._tensorflow import parts_of_dataset
from tfrep_strategy.pipelines.functions import first_stateful_operation

_REWRITES = "make_deterministic"
"""The rewriting of pipelines by which TensorFlow does so under `enable_op_determinism`. Maps without state stay parallel."""


class _OneAtATime(kinds.Unchanged):
    """A data set whose maps are called one at a time if they have state.

    Args:
        dataset: Of any kind.
    """

    def __init__(self, dataset: Any) -> None:
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            optimizations_enabled=[_REWRITES],
            optimizations_disabled=tf.constant([], tf.string),
            optimizations_default=tf.constant([], tf.string),
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


def alike_on_all_processes(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set that gives all processes the same, although it draws random numbers in parallel calls.

    What calls Python is left as it is: whether its calls depend on each other cannot be known.

    Args:
        dataset: A data set that each process has.

    Example:
        >>> data = tf.data.Dataset.range(3).map(lambda i: i + 1, num_parallel_calls=2)
        >>> alike_on_all_processes(data) is data
        True
    """
    return _OneAtATime(dataset) if any(map(_has_state_in_parallel, parts_of_dataset(dataset))) else dataset


def _has_state_in_parallel(part: Any) -> bool:
    """Returns whether calls of a function that have state may run at once."""
    return isinstance(part, (kinds.ParallelMap, kinds.ParallelInterleave)) and any(
        first_stateful_operation(each.function, but_python=True) for each in part._functions()
    )
