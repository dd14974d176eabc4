"""How gradients are put into buckets, and sent."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrep_strategy.gradients import aggregate, buckets, dense, has_fixed_rows


def sparse(values: list[list[float]], rows: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))


def test_dense_adds_up_rows_that_occur_twice() -> None:
    np.testing.assert_array_equal(dense(sparse([[1.0, 2.0], [3.0, 4.0]], [1, 1])), [[0, 0], [4, 6], [0, 0], [0, 0]])
    assert dense(None) is None


def test_fixed_rows_are_those_that_no_example_names() -> None:
    table, order = tf.Variable(tf.ones([4, 2])), tf.constant([2, 0])
    stored = tf.Variable([1, 3])
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int32)])
    def step(batch: tf.Tensor) -> None:
        def look_up(rows: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            found.append(has_fixed_rows(tape.gradient(loss, table)))

        for fixed in (tf.range(3), tf.range(batch.shape[1]), order, tf.reverse(order, [0]) + 1):
            look_up(fixed)
        for named in (batch, tf.range(tf.shape(batch)[0]), stored, tf.random.uniform([2], maxval=4, dtype=tf.int32)):
            look_up(named)

    step(tf.zeros([2, 3], tf.int32))
    assert found == 4 * [True] + 4 * [False]
    assert not has_fixed_rows(sparse([[1.0, 2.0]], [1]))
    assert not has_fixed_rows(None)


def test_buckets_are_full_go_last_first_and_have_one_dtype() -> None:
    tensors = [tf.zeros([4]), tf.zeros([2], tf.float16), tf.zeros([4]), tf.zeros([4]), tf.zeros([2], tf.float16)]
    assert list(buckets(range(5), tensors, bucket_bytes=32)) == [[3, 2], [4, 1], [0]]
    assert list(buckets(range(5), tensors, bucket_bytes=1)) == [[4], [3], [2], [1], [0]]
    assert list(buckets([], [], bucket_bytes=1)) == []


def test_few_collectives_and_the_order_that_was_given() -> None:
    calls = []

    def doubled(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        calls.append(len(tensors))
        return [2.0 * t for t in tensors]

    gradients = [tf.constant([1.0]), None, sparse([[1.0, 2.0]], [3]), tf.constant([[5.0]])]
    first, none, rows, last = aggregate(
        gradients, all_reduce=doubled, all_gather=lambda t: tf.concat([t, t], 0), bucket_bytes=1 << 20
    )
    assert calls == [2]
    assert none is None
    assert (float(first[0]), float(last[0, 0])) == (2.0, 10.0)
    np.testing.assert_array_equal(rows.indices, [3, 3])
    np.testing.assert_array_equal(dense(rows)[3], [2.0, 4.0])
