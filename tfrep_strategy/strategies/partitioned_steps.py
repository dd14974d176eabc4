"""Runs the steps that Keras drives as one device's: a step is traced once, with the global batch, and partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import DistributedVariable, trace, variable_of
from tfrep_strategy.batches import num_examples
from tfrep_strategy.keras_integration.protocol import Shards, Whole
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Shard
from tfrep_strategy.partitioner.step import Given, PartitionedStep
from tfrep_strategy.partitioner.values import OwnRows
from tfrep_strategy.strategies.one_replica import one_replica
from tfrep_strategy.strategies.variables import is_sum


class PartitionedSteps:
    """The steps of one function, by what they are given.

    Args:
        strategy: The strategy whose replicas run them.
        keeps_rows: Whether a process keeps those rows of results that it has computed.
    """

    def __init__(self, strategy: Any, keeps_rows: bool = False) -> None:
        self._strategy, self._keeps_rows = strategy, keeps_rows
        self._traced: dict[Any, _Traced] = {}

    @staticmethod
    def take(shards: Shards) -> bool:
        """Returns whether a step with such a batch can be partitioned: all of its rows are dense, and known to belong together."""
        leaves = _tensors(shards.parts[0])
        if any(not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.variant or leaf.shape.rank is None for leaf in leaves):
            return False
        sizes = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
        with_rows = sum(bool(leaf.shape.rank) for leaf in leaves)
        import os
        if os.environ.get("NEWWAY", ""): return with_rows > 0
        return with_rows == 1 or (with_rows > 1 and len(sizes) == 1 and None not in sizes)

    def run(self, fn: Callable[[Any], Any], shards: Shards) -> Whole:
        """Adds a step to the graph that is being built.

        Args:
            fn: What one device would do with a batch.
            shards: The batch.

        Returns:
            What `fn` returns for the global batch, as `Whole`.
        """
        total = tf.get_static_value(shards.total)
        specs = [_spec(leaf, total) for leaf in tf.nest.flatten(shards.parts[0])]
        key = tuple(specs)
        if key not in self._traced:
            self._traced[key] = _Traced(self._strategy, fn, tf.nest.pack_sequence_as(shards.parts[0], specs), self._keeps_rows)
        return Whole(self._traced[key].run(shards))


class _Traced:
    """A step that was traced for batches of one kind."""

    def __init__(self, strategy: Any, fn: Callable[[Any], Any], batch: Any, keeps_rows: bool) -> None:
        self._strategy = strategy
        made: list[Any] = [None]
        while made:  # As `tf.function` does: what made variables is traced once more, now that they are there.
            with one_replica(strategy) as made:
                graph = trace("step", fn, [batch], {})
        strategy.extended.synchronize_new_variables()
        self._results = graph.structured_outputs
        self._captured = [outer for outer, _ in graph.captures]
        given = [Given(Shard(0) if x.shape.rank else REPLICATE) for x in graph.inputs[: -len(self._captured) or None]]
        given += map(_given, self._captured)
        self._step = PartitionedStep(graph, given, strategy.extended.num_local_replicas, keeps_rows)

    def run(self, shards: Shards) -> Any:
        inputs = [[*_tensors(part), *self._captured_by(i)] for i, part in enumerate(shards.parts)]
        first, *_ = self._step.run(self._rows(shards), inputs, self._strategy.extended.transport)
        results = iter(first)
        flat = tf.nest.flatten(self._results, expand_composites=True)
        return tf.nest.pack_sequence_as(
            self._results, [next(results) if tf.is_tensor(each) else each for each in flat], expand_composites=True
        )

    def _captured_by(self, replica: int) -> list[Any]:
        every = map(_copies, self._captured)
        return [copies[replica] if len(copies) > 1 else copies[0] for copies in every]

    def _rows(self, shards: Shards) -> list[OwnRows]:
        extended = self._strategy.extended
        total, counts = tf.cast(shards.total, tf.int32), [tf.cast(num_examples(part), tf.int32) for part in shards.parts]
        start = extended.rows_before(counts[0]) if self._step.asks_for_start else tf.constant(0)
        rows = []
        for replica, count in enumerate(counts, extended.first_local_replica):
            rows.append(OwnRows(start, count, total, tf.constant(replica)))
            start += count
        return rows


def _is_nothing(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.experimental.Optional)  # In place of which Keras passes None.


def _tensors(part: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(part) if not _is_nothing(leaf)]


def _spec(leaf: Any, total: int | None) -> tf.TensorSpec | None:
    if _is_nothing(leaf):
        return None
    is_open = leaf.shape.rank and (leaf.shape[0] is None or total is None)
    return tf.TensorSpec([None if is_open else total, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def _copies(captured: Any) -> list[Any]:
    """Returns what the replicas of this process have of what a step captures: one thing for all, or one for each."""
    variable = variable_of(captured) if captured.dtype == tf.resource else None
    return [copy.handle for copy in variable.values] if isinstance(variable, DistributedVariable) else [captured]


def _given(captured: Any) -> Given:
    variable = variable_of(captured) if captured.dtype == tf.resource else None
    is_partial = isinstance(variable, DistributedVariable) and is_sum(variable)
    return Given(PARTIAL if is_partial else REPLICATE, is_shared=captured.dtype == tf.resource and len(_copies(captured)) == 1)
