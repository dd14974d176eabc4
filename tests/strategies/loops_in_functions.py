"""Loops over distributed data inside a `tf.function`, which AutoGraph turns into loops of the graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

SUM = tf.distribute.ReduceOp.SUM


def check(strategy: Any) -> None:
    """Loops in all ways, and sums what every example adds once."""
    pairs = tf.data.Dataset.from_tensor_slices((tf.range(7), tf.range(7) * 10)).batch(4)
    distributed = strategy.experimental_distribute_dataset(pairs)

    def total_of(batch: Any) -> Any:
        totals = strategy.run(lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y), args=batch)
        return strategy.reduce(SUM, totals, axis=None)

    @tf.function
    def over_dataset() -> Any:
        total, steps = 0, 0
        for batch in distributed:
            total += total_of(batch)
            steps += 1
        return total, steps

    @tf.function
    def over_iterator(iterator: Any) -> Any:
        total, steps = 0, 0
        for batch in iterator:
            total += total_of(batch)
            steps += 1
        return total, steps

    @tf.function
    def over_optionals(iterator: Any) -> Any:
        total, steps = 0, 0
        optional = iterator.get_next_as_optional()
        while optional.has_value():
            total += total_of(optional.get_value())
            steps += 1
            optional = iterator.get_next_as_optional()
        return total, steps

    for total, steps in (over_dataset(), over_iterator(iter(distributed)), over_optionals(iter(distributed))):
        assert (int(total), int(steps)) == (231, 2)
