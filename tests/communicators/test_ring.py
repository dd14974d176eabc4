"""TensorFlow's collectives leave nothing behind in a process that calls many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf


def threads_after_many_collectives(strategy: Any) -> tuple[int, int]:
    communicator = strategy.communicator

    @tf.function
    def reduced(x: tf.Tensor) -> tf.Tensor:
        return communicator.all_reduce([x])[0]

    def call_some() -> int:
        for _ in range(30):
            communicator.all_gather(tf.ones([2]))
            reduced(tf.ones([2]))
        return len(list(Path("/proc/self/task").iterdir()))

    return call_some(), call_some()


def test_threads_do_not_pile_up(worker_pool: Any) -> None:
    for before, after in worker_pool("tf", 2).run(threads_after_many_collectives):
        assert after < before + 10


def sums_of_as_many(strategy: Any) -> list[list[Any]]:
    """Sums seven scalars, of one dtype and of two: TensorFlow remembers the shape of what goes by one key."""
    tensors = [[tf.constant(1.0)] * 7, [tf.constant(1.0)] * 6 + [tf.constant(2)], [tf.constant(1.0)] * 5 + [tf.constant(2)] * 2]
    return [[total.numpy().item() for total in strategy.communicator.all_reduce(each)] for each in tensors]


def sums_of_known_and_unknown_sizes(strategy: Any) -> list[list[float]]:
    """Few numbers are gathered, and added up; of an unknown size they are reduced. Both traces have a sum in the same place."""

    def summed(x: tf.Tensor) -> tf.Tensor:
        return strategy.communicator.all_reduce([x])[0]

    known, unknown = (tf.function(summed, [tf.TensorSpec([size])]) for size in (2, None))
    x = tf.constant([1.0, 2.0]) * (strategy.rank + 1.0)
    return [function(x).numpy().tolist() for function in (known, unknown, known)]


def test_sums_of_known_and_unknown_sizes_do_not_meet(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(sums_of_known_and_unknown_sizes) == [[[3.0, 6.0]] * 3] * 2


def test_as_many_tensors_of_other_dtypes(worker_pool: Any) -> None:
    expected = [[2.0] * 7, [2.0] * 6 + [4], [2.0] * 5 + [4, 4]]
    for communicator in ("tf", "horovod"):
        assert worker_pool(communicator, 2).run(sums_of_as_many) == [expected] * 2
