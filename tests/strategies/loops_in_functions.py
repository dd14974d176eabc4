"""Loops over distributed data inside a `tf.function`, which AutoGraph turns into loops of the graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import tfrep_strategy as tfrep

SUM = tf.distribute.ReduceOp.SUM


def check(strategy: Any) -> None:
    """Loops in all ways, and sums what every example adds once."""
    pairs = tf.data.Dataset.from_tensor_slices((tf.range(7), tf.range(7) * 10)).batch(4)
    distributed = strategy.experimental_distribute_dataset(pairs)

    def total_of(batch: Any) -> Any:
        totals = strategy.run(lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y), args=batch)
        return strategy.reduce(SUM, totals, axis=None)

    def over(batches: Any) -> Any:
        total, steps = 0, 0
        for batch in batches:
            total += total_of(batch)
            steps += 1
        return total, steps

    @tf.function
    def over_dataset() -> Any:
        return over(distributed)

    over_iterator = tf.function(over)

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
    check_what_is_handed_on(strategy)


def check_what_is_handed_on(strategy: Any) -> None:
    """AutoGraph also converts the functions that the package calls for its user."""

    def doubled_if_positive(value: Any) -> Any:
        if value > 0:
            return value * 2
        return -value

    @tf.function
    def spread() -> Any:
        values = strategy.run(lambda: tfrep.map_reduce(doubled_if_positive, tf.constant([1, -3, 2]), "sum"))
        return strategy.experimental_local_results(values)

    assert [int(value) for value in spread()] == [9] * len(spread())

    with tfrep.Replicator(strategy) as replicator:
        results = replicator.run(lambda: doubled_if_positive(tf.cast(tfrep.replica_id(), tf.float32)))
        assert [float(value) for value in replicator.local_results(results)] == [
            2.0 * (strategy.extended.first_local_replica + i) for i in range(strategy.extended.num_local_replicas)
        ]
