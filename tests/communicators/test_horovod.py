"""Horovod's operations in functions: all ranks run them, whatever TensorFlow's optimiser thinks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def constants_and_results_that_one_rank_uses(strategy: Any) -> list[float]:
    communicator, rank = strategy.communicator, strategy.communicator.rank

    @tf.function
    def step() -> tf.Tensor:
        # Enough of them that ranks would run them in different orders while they optimise.
        sums = [communicator.all_reduce([tf.constant([float(i + rank)])])[0] for i in range(20)]
        rows = communicator.all_gather(tf.fill([2], 1.0))
        chief = communicator.all_reduce([rows[:1] + 1.0], "max")[0]
        return tf.concat([*sums, chief], 0) if rank == 0 else tf.zeros([1])

    return [step().numpy() for _ in range(3)]


def test_constants_and_results_that_one_rank_uses(worker_pool: Any) -> None:
    first, second = worker_pool("horovod", 2).run(constants_and_results_that_one_rank_uses)
    for value in first:
        np.testing.assert_array_equal(value, [*(2.0 * i + 1 for i in range(20)), 2.0])
    for value in second:
        np.testing.assert_array_equal(value, [0.0])
