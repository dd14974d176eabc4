"""One batch: counted, and made of nothing."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfrep_strategy.batches import any_size, empty_batch, num_examples


@pytest.mark.parametrize(("value", "expected"), [(tf.zeros([3, 2]), 3), (tf.zeros([0]), 0), (tf.constant(5), 1)])
def test_examples_are_counted_whatever_is_known_of_the_rank(value: tf.Tensor, expected: int) -> None:
    for shape in (value.shape, None):
        count = tf.function(num_examples, input_signature=[tf.TensorSpec(shape, value.dtype)])
        assert int(count(value)) == expected


@pytest.mark.parametrize(
    "spec",
    [
        tf.TensorSpec([4, 3], tf.float32),
        tf.TensorSpec([None, None], tf.string),
        tf.TensorSpec(None, tf.int32),
        tf.SparseTensorSpec([None, 3]),
        tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int32),
        tf.RaggedTensorSpec([4, None, None, 2], tf.float32, 2),
        {"a": tf.TensorSpec([2]), "b": (tf.RaggedTensorSpec([None, None, 3], ragged_rank=1),)},
    ],
)
def test_an_empty_batch_is_of_the_kind_of_the_others(spec: Any) -> None:
    empty = empty_batch(spec)
    assert int(num_examples(empty)) == 0
    for leaf, kind in zip(tf.nest.flatten(empty), tf.nest.flatten(any_size(spec)), strict=True):
        assert kind.is_compatible_with(leaf), (leaf, kind)


def test_what_is_no_batch_has_an_empty_one() -> None:
    scalar, nothing = empty_batch((tf.TensorSpec([], tf.int64), tf.OptionalSpec(tf.TensorSpec([]))))
    assert int(scalar) == 0
    assert not nothing.has_value()
