"""What the tensors of a step need, compared with sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import planned

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.memory import Footprint, footprint
from tfrep_strategy.partitioner.placements import Shard

pytestmark = pytest.mark.lane("quick")

_WIDE = tf.Variable(np.ones([4, 100]))
_OTHER = tf.Variable(np.ones([4, 100]))
_ROW, _HIDDEN = 4 * 8, 100 * 8
"""The bytes of a row of the batch, and of one behind a product with the variable."""
_SMALL = 64
"""Scalars, axes and sizes."""


def _found(function: Callable[..., Any], batch: int, replicas: int, is_open: bool = True) -> Footprint:
    step = planned(function, [np.ones([10, 4])], [Shard(0)], 2, is_open)
    return footprint(step.plan, step.graph, batch, replicas)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("batch", "replicas", "rows"), [(10, 2, 5), (10, 1, 10), (11, 3, 4), (1000, 8, 125)])
def test_a_chain_of_operations(batch: int, replicas: int, rows: int, is_open: bool) -> None:
    found = _found(lambda x: tf.reduce_sum(tf.tanh(x @ _WIDE)), batch, replicas, is_open)
    by_hand = rows * (_ROW + 2 * _HIDDEN)  # The batch, and what the hyperbolic tangent reads and gives.
    assert 0 <= found.others - by_hand <= _SMALL
    assert (found.gradients, found.guessed) == (0, 0)


def test_what_may_run_at_a_time() -> None:
    found = _found(lambda x: tf.reduce_sum(tf.tanh(x @ _WIDE)) + tf.reduce_sum(tf.tanh(x @ _OTHER)), 10, 2)
    assert 0 <= found.others - 5 * (_ROW + 4 * _HIDDEN) <= 2 * _SMALL


def test_what_lives_from_the_forward_to_the_backward_pass() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            hidden = x
            for _ in range(3):
                hidden = tf.tanh(hidden @ _WIDE @ tf.transpose(_OTHER))
            loss = tf.reduce_sum(hidden)
        gradients = tape.gradient(loss, [_WIDE, _OTHER])
        marks.note_applied(gradients)
        return gradients

    found = _found(step, 1000, 2)
    assert found.gradients == 2 * 4 * _HIDDEN
    assert 500 * (_ROW + 3 * (_HIDDEN + _ROW)) <= found.others < 500 * 3 * 6 * (_HIDDEN + _ROW)


def test_the_whole_of_what_replicas_have_in_rows() -> None:
    """Every row is compared with all rows."""
    found = _found(lambda x: tf.reduce_sum(tf.nn.softmax(tf.matmul(x, x, transpose_b=True))), 1000, 4)
    whole, logits = 1000 * _ROW, 250 * 1000 * 8
    assert whole + 2 * logits <= found.others < whole + 4 * logits


def test_the_elements_that_a_loop_collects() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        collected = tf.TensorArray(tf.float64, 7)
        for i in tf.range(7):
            collected = collected.write(i, x @ _WIDE)
        return tf.reduce_sum(collected.stack())

    found = _found(tf.autograph.to_graph(step), 10, 2)
    elements = 7 * 5 * _HIDDEN
    assert 2 * elements <= found.others < 2 * elements + 8 * 5 * (_HIDDEN + _ROW) + _SMALL, "the list, and the stack"
    assert found.guessed == 0


def test_a_branch_and_a_function() -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(x @ _WIDE))

    found = _found(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: tf.constant(0.0, tf.float64)), 10, 2)
    assert 0 <= found.others - 5 * (_ROW + 2 * _HIDDEN) <= 2 * _SMALL


def test_variables_that_are_written_may_be_there_twice() -> None:
    found = _found(lambda x: _WIDE.assign_add(tf.reduce_sum(x) * tf.ones([4, 100], tf.float64)), 10, 2)
    assert found.others >= 4 * _HIDDEN


def test_sizes_that_the_data_decide_are_told() -> None:
    assert _found(lambda x: tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)), 100, 2).guessed
