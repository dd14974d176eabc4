"""One batch: counted, and made of nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.data.batches import any_size, cut, empty_batch, has_open_sizes, num_examples, open_sizes, with_open_sizes

pytestmark = pytest.mark.lane("quick")


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


def test_an_empty_batch_gets_the_sizes_of_another() -> None:
    batch = {
        "dense": tf.zeros([2, 5, 3]),
        "words": tf.fill([2, 4], "word"),
        "sparse": tf.sparse.from_dense(tf.ones([2, 6])),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.zeros([3, 7]), [1, 2]),
        "number": tf.constant(1),
    }
    spec = {
        "dense": tf.TensorSpec([2, None, 3]),
        "words": tf.TensorSpec([None, None], tf.string),
        "sparse": tf.SparseTensorSpec([None, None]),
        "ragged": tf.RaggedTensorSpec([None, None, None], ragged_rank=1),
        "number": tf.TensorSpec([], tf.int32),
    }
    assert has_open_sizes(spec)
    found = with_open_sizes(spec, empty_batch(spec), open_sizes(spec, batch))
    assert found["dense"].shape == [0, 5, 3]
    assert found["words"].shape == [0, 4]
    assert found["sparse"].dense_shape.numpy().tolist() == [0, 6]
    assert found["ragged"].flat_values.shape == [0, 7]
    same = with_open_sizes(spec, batch, open_sizes(spec, batch))
    for leaf, other in zip(*(tf.nest.flatten(each, expand_composites=True) for each in (same, batch)), strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert not has_open_sizes(tf.nest.map_structure(tf.type_spec_from_value, batch) | {"ragged": tf.RaggedTensorSpec([2, None, 7])})


def test_parts_of_rows_that_do_not_belong_together() -> None:
    """The first part is the whole batch, also where only the run knows the numbers of rows."""
    batch = {"nodes": tf.range(5), "edges": tf.reshape(tf.range(14), [7, 2]), "rate": tf.constant(0.5)}
    ragged = {"words": tf.ragged.constant([[1], [2, 3], [4]]), "sparse": tf.sparse.from_dense(tf.eye(4))}

    def sizes(given: Any) -> list[list[int]]:
        return [[int(num_examples(leaf)) for leaf in tf.nest.flatten(cut(given, 3, i))] for i in range(3)]

    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None] * leaf.shape.rank, leaf.dtype), batch)
    in_function = tf.function(lambda given: [cut(given, 3, i) for i in range(3)], input_signature=[spec])
    assert sizes(batch) == [[7, 5, 1], [0, 0, 1], [0, 0, 1]]
    assert [[int(num_examples(leaf)) for leaf in tf.nest.flatten(part)] for part in in_function(batch)] == sizes(batch)
    assert sizes(ragged) == [[4, 3], [0, 0], [0, 0]]
    rows = [tf.RaggedTensorSpec([None, None], tf.int32), tf.SparseTensorSpec([None, None])]
    of_ragged = tf.function(lambda words, sparse: [cut((words, sparse), 3, i) for i in range(3)], input_signature=rows)
    found = of_ragged(ragged["words"], ragged["sparse"])
    assert [[int(num_examples(leaf)) for leaf in part] for part in found] == [[3, 4], [0, 0], [0, 0]]
    alike = batch | {"edges": batch["edges"][:5]}
    assert [[int(num_examples(leaf)) for leaf in tf.nest.flatten(part)] for part in in_function(alike)] == sizes(alike)
    assert sizes(alike) == [[2, 2, 1], [2, 2, 1], [1, 1, 1]]
