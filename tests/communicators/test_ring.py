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
