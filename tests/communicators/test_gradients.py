"""How gradients are put into buckets, and sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.gradients import aggregate, buckets, dense, summed_where_alike, transformed

pytestmark = pytest.mark.lane("quick")


def sparse(values: list[list[float]], rows: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))


def test_dense_adds_up_rows_that_occur_twice() -> None:
    np.testing.assert_array_equal(dense(sparse([[1.0, 2.0], [3.0, 4.0]], [1, 1])), [[0, 0], [4, 6], [0, 0], [0, 0]])
    assert dense(None) is None


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


def test_an_error_of_a_transformer_of_pairs_is_told() -> None:
    def refuses(pairs: Any) -> Any:
        raise ValueError(f"no gradient of {[name for _, name in pairs]}")

    with pytest.raises(TypeError) as raised:  # Of bare gradients, which it cannot take either.
        transformed(refuses, [tf.constant(1.0)], ["kernel"])
    assert str(raised.value.__cause__) == "no gradient of ['kernel']"


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("takes_pairs", [False, True])
def test_state_of_a_transformer_changes_once(takes_pairs: bool, in_function: bool) -> None:
    calls, kernel = tf.Variable(0), tf.Variable([[1.0, 2.0]])

    def transform(given: list[Any]) -> list[Any]:
        calls.assign_add(1)
        gradients = [gradient for gradient, _ in given] if takes_pairs else given
        gradients = [tf.transpose(gradient, [1, 0]) * tf.cast(calls, tf.float32) for gradient in gradients]
        return list(zip(gradients, [kernel], strict=True)) if takes_pairs else gradients

    def step() -> Any:
        return transformed(transform, [tf.constant([[1.0, 3.0]])], [kernel])[0]

    step = tf.function(step) if in_function else step
    for count in (1, 2):
        np.testing.assert_array_equal(step(), [[1.0 * count], [3.0 * count]])
        assert int(calls) == count


def test_transformers_that_cannot_be_tried_in_a_graph() -> None:
    made: list[tf.Variable] = []

    def looks(pairs: Any) -> Any:
        return [(g if g.numpy() < 1.0 else g / 2.0, v) for g, v in pairs]

    def makes(gradients: Any) -> Any:
        made.extend([] if made else [tf.Variable(3.0)])
        return [made[0] * g for g in gradients]

    assert float(transformed(looks, [tf.constant(4.0)], ["kernel"])[0]) == 2.0
    step = tf.function(lambda gradient: transformed(makes, [gradient], ["kernel"]))
    assert [float(step(tf.constant(x))[0]) for x in (1.0, 2.0)] == [3.0, 6.0]


def test_slices_that_all_replicas_computed() -> None:
    values = tf.constant([[1.0], [2.0], [4.0], [8.0]])
    for rows, expected in (([5, 3, 5, 3], [5, 10]), ([5, 3, 3, 5], [1, 2, 4, 8]), ([5, 5, 5, 5], [5, 10])):
        merged = summed_where_alike(tf.IndexedSlices(values, tf.constant(rows), tf.constant([6, 1])), 2)
        assert merged.values[:, 0].numpy().tolist() == expected
    odd = tf.IndexedSlices(values[:3], tf.constant([5, 5, 5]), tf.constant([6, 1]))
    assert len(summed_where_alike(odd, 2).values) == 3
