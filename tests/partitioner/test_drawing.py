"""Numbers that replicas draw for their rows are those that one device draws for all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import Shard

_DRAWS = {
    "uniform": lambda shape, seed: tf.random.stateless_uniform(shape, seed),
    "uniform, in half precision": lambda shape, seed: tf.random.stateless_uniform(shape, seed, dtype=tf.float16),
    "uniform, in double precision": lambda shape, seed: tf.random.stateless_uniform(shape, seed, dtype=tf.float64),
    "normal": lambda shape, seed: tf.random.stateless_normal(shape, seed),
    "normal, in double precision": lambda shape, seed: tf.random.stateless_normal(shape, seed, dtype=tf.float64),
    "integers": lambda shape, seed: tf.random.stateless_uniform(shape, seed, 0, 1000, tf.int32),
    "long integers": lambda shape, seed: tf.random.stateless_uniform(shape, seed, 0, 10**12, tf.int64),
    "all integers": lambda shape, seed: tf.random.stateless_uniform(shape, seed, None, None, tf.int32),
    "truncated": lambda shape, seed: tf.random.stateless_truncated_normal(shape, seed),
    "dropout": lambda shape, seed: tf.nn.experimental.stateless_dropout(tf.ones(shape), 0.4, seed),
}


@pytest.mark.parametrize("name", _DRAWS)
def test_numbers_of_own_rows(name: str) -> None:
    rows = np.ones([7, 3])
    for counts, width in itertools.product([(4, 3), (0, 7), (2, 1, 4), (7, 0)], [(3,), (5,), (2, 3), ()]):

        def drawn(x: tf.Tensor, width: tuple[int, ...] = width) -> tf.Tensor:
            numbers = _DRAWS[name](tf.stack([tf.shape(x)[0], *width]), [3, 5])
            return tf.cast(numbers, tf.float64) * tf.reshape(x[:, 0], [-1, *[1] * len(width)])  # Rows that nobody has whole.

        worst, step, _ = differences(drawn, [rows], [Shard(0)], counts)
        assert worst == 0
        assert step.asks_for_start


def test_a_counter_is_carried_on() -> None:
    counter = tf.constant([2**64 - 3, 7], tf.uint64)

    def drawn(x: tf.Tensor) -> tf.Tensor:
        shape = tf.stack([tf.shape(x)[0], 5])
        return x * tf.raw_ops.StatelessRandomUniformV2(shape=shape, key=tf.constant([11], tf.uint64), counter=counter, alg=1)

    worst, *_ = differences(drawn, [np.ones([9, 1], "float32")], [Shard(0)], (2, 4, 3))
    assert worst == 0


def test_only_own_numbers_are_drawn() -> None:
    def drawn(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x * tf.random.stateless_normal(tf.shape(x), [1, 2]), 0)

    _, step, _ = differences(drawn, [np.ones([8, 4], "float32")], [Shard(0)], (4, 4))
    assert step.describe()[0].startswith("Tensors: ")
    kept = [node for node in step.nodes if getattr(node, "type", "") == "StatelessRandomNormalV2"]
    assert len(kept) == 1, "the numbers of all rows are not needed"
