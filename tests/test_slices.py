"""Which slices of sparse gradients belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfrep_strategy.gradients import aggregate, dense
from tfrep_strategy.slices import Kind, has_fixed_rows, parts_of, summed_where_alike

REPLICAS = 2


def gradient_in_function(
    look_up: Callable[[tf.Variable, tf.Tensor], tf.Tensor], shape: Sequence[int | None] = (None, 3)
) -> list[Kind]:
    """Returns the kinds of a gradient's slices, where `look_up(table, batch)` makes the loss."""
    table, found = tf.Variable(tf.ones([4, 2])), []

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int32)])
    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(table, batch))
        found.extend(part.kind for part in parts_of(tape.gradient(loss, table)))

    step(tf.zeros([2, 3], tf.int32))
    return found


def test_fixed_rows_are_those_that_no_example_names() -> None:
    order, stored = tf.constant([2, 0]), tf.Variable([1, 3])
    fixed = (
        lambda batch: tf.range(3),
        lambda batch: tf.range(batch.shape[1]),
        lambda batch: order,
        lambda batch: tf.reverse(order, [0]) + 1,
        lambda batch: tf.constant([[0, 1], [1, 2]]),
    )
    named = (
        lambda batch: batch,
        lambda batch: tf.range(tf.shape(batch)[0]),
        lambda batch: tf.random.uniform([2], maxval=4, dtype=tf.int32),
    )
    for rows in fixed:
        assert gradient_in_function(lambda table, batch, rows=rows: tf.gather(table, rows(batch))) == [Kind.FIXED]
    for rows in named:
        assert gradient_in_function(lambda table, batch, rows=rows: tf.gather(table, rows(batch))) == [Kind.NAMED]
    assert gradient_in_function(lambda table, batch: tf.gather(table, stored)) == [Kind.ALIKE]
    assert gradient_in_function(lambda table, batch: tf.gather(table, batch + stored[0])) == [Kind.NAMED]


def test_a_product_with_a_sparse_matrix_asks_for_each_row_once() -> None:
    def product(table: tf.Variable, batch: tf.Tensor) -> tf.Tensor:
        return tf.nn.embedding_lookup_sparse(table, tf.sparse.from_dense(batch + 1), None, combiner="sum")

    assert gradient_in_function(product) == [Kind.DISTINCT]
    assert gradient_in_function(lambda t, b: product(t, b) + product(t, 2 * b)) == 2 * [Kind.DISTINCT]


def test_lookups_of_several_kinds() -> None:
    def several(table: tf.Variable, batch: tf.Tensor) -> tf.Tensor:
        names = tf.reshape(batch, [-1])
        drawn = tf.gather(table, tf.concat([names, [0, 2]], 0))  # As in a sampled softmax.
        return tf.reduce_sum(drawn) + tf.reduce_sum(tf.gather(table, tf.unique(names)[0])) + tf.reduce_sum(tf.gather(table, names))

    assert gradient_in_function(several) == [Kind.DISTINCT, Kind.NAMED, Kind.FIXED]
    eager = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([4, 2]))
    assert [part.kind for part in parts_of(eager)] == [Kind.NAMED]


def test_lookups_inside_functions() -> None:
    order = tf.constant([2, 0, 0])
    looked_up = tf.function(tf.gather)
    positions = tf.function(lambda table: tf.gather(table, order))
    once = tf.function(lambda table, rows: tf.gather(table, tf.unique(rows)[0]))
    layer = tf.function(lambda table, rows: tf.reduce_sum(once(table, rows)) + tf.reduce_sum(positions(table)))

    assert gradient_in_function(lambda table, batch: looked_up(table, batch)) == [Kind.NAMED]
    assert gradient_in_function(lambda table, batch: looked_up(table, tf.range(2))) == [Kind.FIXED]
    assert gradient_in_function(lambda table, batch: positions(table)) == [Kind.FIXED]
    assert gradient_in_function(lambda table, batch: once(table, batch[:, 0])) == [Kind.DISTINCT]
    assert gradient_in_function(lambda table, batch: layer(table, batch[:, 0])) == [Kind.DISTINCT, Kind.FIXED]


def test_all_replicas_have_the_slices_of_one_device() -> None:
    """Each of two equal replicas has half of the gradient. Squares show how a row was divided."""
    table, names = tf.Variable(tf.ones([4, 1])), tf.constant([3, 1, 3])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def squares(batch: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            once = tf.reduce_sum(tf.gather(table, tf.unique(batch)[0]) * [[2.0], [4.0]])
            fixed = tf.reduce_sum(tf.gather(table, [0, 1, 1]) * [[2.0], [4.0], [6.0]])
            named = tf.reduce_sum(tf.gather(table, batch))
            every = once + fixed + named
        gradients = [tape.gradient(loss, table) for loss in (once, fixed, named, every)]
        assert list(map(has_fixed_rows, [*gradients, None])) == [False, True, False, False, False]
        doubled = aggregate(
            [tf.IndexedSlices(g.values / REPLICAS, g.indices, g.dense_shape) for g in gradients],
            all_reduce=lambda tensors: [REPLICAS * tensor for tensor in tensors],
            all_gather=lambda tensor: tf.concat(REPLICAS * [tensor], 0),
            bucket_bytes=1 << 20,
        )
        return [dense(tf.IndexedSlices(tf.square(g.values), g.indices, g.dense_shape))[:, 0] for g in doubled]

    once, fixed, named, every = squares(names)
    np.testing.assert_allclose(once, [0, 16, 0, 4])
    np.testing.assert_allclose(fixed, [4, 16 + 36, 0, 0])
    np.testing.assert_allclose(named, [0, 2 * 0.25, 0, 4 * 0.25])
    np.testing.assert_allclose(every, once + fixed + named)


def test_lengths_that_all_rows_share() -> None:
    def of_length(taken: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Variable, tf.Tensor], tf.Tensor]:
        return lambda table, batch: tf.gather(table, tf.range(taken(tf.shape(batch))))

    assert gradient_in_function(of_length(lambda shape: shape[1])) == [Kind.FIXED], "of known length"
    for taken in (lambda shape: shape[1], lambda shape: shape[-1], lambda shape: tf.unstack(shape)[1], lambda shape: shape[1:][0]):
        assert gradient_in_function(of_length(taken), [None, None]) == [Kind.ALIKE]
    for taken in (lambda shape: shape[0], lambda shape: shape[:2][1], lambda shape: shape[0] + shape[1] - 2):
        assert gradient_in_function(of_length(taken), [None, None]) == [Kind.NAMED], "of as many as there are rows"


def test_slices_that_all_replicas_computed() -> None:
    values = tf.constant([[1.0], [2.0], [4.0], [8.0]])
    for rows, expected in (([5, 3, 5, 3], [5, 10]), ([5, 3, 3, 5], [1, 2, 4, 8]), ([5, 5, 5, 5], [5, 10])):
        merged = summed_where_alike(tf.IndexedSlices(values, tf.constant(rows), tf.constant([6, 1])), REPLICAS)
        assert merged.values[:, 0].numpy().tolist() == expected
    odd = tf.IndexedSlices(values[:3], tf.constant([5, 5, 5]), tf.constant([6, 1]))
    assert len(summed_where_alike(odd, REPLICAS).values) == 3
