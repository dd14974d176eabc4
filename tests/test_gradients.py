"""How gradients are weighed, put into buckets, and sent."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrep_strategy.gradients import aggregate, buckets, dense, has_fixed_rows, weighed, zero_unless


def sparse(values: list[list[float]], rows: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))


def test_a_weight_of_zero_silences_what_is_not_finite() -> None:
    zero = tf.constant(0.0)
    np.testing.assert_array_equal(weighed(tf.constant([np.nan, np.inf, 1.0]), zero), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(weighed(sparse([[np.nan, 1.0]], [2]), zero).values, [[0.0, 0.0]])
    assert weighed(None, zero) is None
    half = weighed(tf.constant([2.0], tf.float16), tf.constant(0.5))
    assert half.dtype == tf.float16
    assert half.numpy() == 1.0


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


def test_a_share_is_not_rounded_to_the_dtype_of_the_gradient() -> None:
    # A third of 100 is 33.25 in bfloat16. The product with a third in bfloat16 would be 33.5.
    assert float(weighed(tf.constant(100.0, tf.bfloat16), tf.constant(1 / 3))) == 33.25


def test_all_small_gradients_are_silenced_at_once() -> None:
    gradients = [tf.fill([3], np.nan), None, sparse([[1.0, 2.0]], [3]), tf.ones([2000]), *[tf.ones([2, 2]) for _ in range(20)]]
    for has_examples in (False, True):
        step = tf.function(lambda has=has_examples: zero_unless(tf.constant(has), gradients)).get_concrete_function()
        found = step()
        assert [op.type for op in step.graph.get_operations()].count("SelectV2") == 1
        np.testing.assert_array_equal(found[0], np.full([3], np.nan) if has_examples else np.zeros([3]))
        assert found[1] is None
        np.testing.assert_array_equal(dense(found[2]), dense(gradients[2]))
        np.testing.assert_array_equal(found[3], np.ones([2000]))
        for gradient in found[4:]:
            np.testing.assert_array_equal(gradient, np.full([2, 2], float(has_examples)))
