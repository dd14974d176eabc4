"""Training over shared memory: the answer of one device, and the order of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from lanes import others_in_lane
from test_one_device_answer import CUT, PROMISED, assert_same, on_one_device, run_in_scope

import tfrep_strategy as tfrep

NAMES = [*PROMISED, *CUT, "sentences_of_any_length", "predicted_strings"]


@pytest.mark.parametrize("name", others_in_lane("wires", NAMES, "adam", "fewer_rows_than_replicas", "predicted_strings"))
def test_two_processes(name: str, worker_pool: Any) -> None:
    pool = worker_pool("shared_memory", 2)
    for rank, found in enumerate(pool.run(run_in_scope, name, limit=120, meanwhile=lambda: on_one_device(name))):
        assert_same(found, on_one_device(name), f"rank {rank}: {name}")


def branch_beside_a_sum(strategy: Any, slow_rank: int) -> list[list[float]]:
    """Sums in a branch that uses a variable, and beside it; on one rank the branch has much to do before."""
    variable = tf.Variable(2.0)
    matrix = tf.eye(400)

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def in_branch() -> tf.Tensor:
            mine = matrix
            for _ in range(20 if strategy.rank == slow_rank else 0):
                mine = tf.matmul(mine, matrix)
            return tfrep.all_sum(x * variable * mine[0, 0])

        def replica() -> tuple[tf.Tensor, tf.Tensor]:
            return tf.cond(x[0] > 0, in_branch, lambda: x), tfrep.all_sum(x[:1])

        return strategy.run(replica)

    return [[float(part[0]) for part in step(tf.constant([scale, 1.0]))] for scale in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_branch_and_what_follows_stay_in_order(slow_rank: int, worker_pool: Any) -> None:
    for found in worker_pool("shared_memory", 2).run(branch_beside_a_sum, slow_rank, limit=60):
        assert found == [[4.0, 2.0], [8.0, 4.0], [12.0, 6.0]]
