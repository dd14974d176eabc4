"""Marked operations: on replicas they do what on one device gives what it gets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import Together, own_rows, planned

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Shard
from tfrep_strategy.partitioner.step import PartitionedStep

_ROWS = np.arange(12.0).reshape(6, 2)
_COUNTS = (3, 0, 3)
_SIZE = len(_COUNTS)


def _results(function: Callable[..., tf.Tensor], values: list[np.ndarray], placements: list, of_each: list) -> list[np.ndarray]:
    """Returns what each replica gets of a function, given what each has of its arguments."""
    return _run(planned(function, values, placements, _SIZE, is_open=True), of_each, Together(_SIZE))


def _run(step: PartitionedStep, of_each: list, transport: Together) -> list[np.ndarray]:
    inputs = [[tf.constant(x) for x in each] for each in of_each]
    return [own.numpy() for (own,) in step.run(own_rows(_COUNTS, sum(_COUNTS)), inputs, transport)]


_OF_EACH = [[_ROWS[:3]], [_ROWS[:0]], [_ROWS[3:]]]
_ADDENDS = [[np.full([2, 3], float(i + 1))] for i in range(_SIZE)]


def test_gradients_are_summed() -> None:
    for own in _results(lambda x: marks.gradient(tf.reduce_sum(x, 0)), [_ROWS], [Shard(0)], _OF_EACH):
        np.testing.assert_array_equal(own, _ROWS.sum(0))


def test_slices_are_gathered() -> None:
    for own in _results(lambda x: marks.slices(x * 2.0), [_ROWS], [Shard(0)], _OF_EACH):
        np.testing.assert_array_equal(own, 2.0 * _ROWS)


def _in_parts(whole: tf.Tensor) -> tf.Tensor:
    """Adds the number of the replica to the part of each."""
    rows = tf.reshape(tf.pad(tf.reshape(whole, [-1]), [[0, 6 * _SIZE - 6]]), [_SIZE, 6])
    own = marks.own_row(rows) + tf.cast(marks.replica(), rows.dtype)
    return marks.all_rows(own, _SIZE)


@pytest.mark.parametrize("placement", [PARTIAL, REPLICATE])
def test_parts_of_each_are_put_together(placement: object) -> None:
    given = _ADDENDS if placement == PARTIAL else [[np.full([2, 3], 6.0)]] * _SIZE
    for own in _results(_in_parts, [np.full([2, 3], 6.0)], [placement], given):
        wanted = np.zeros([_SIZE, 6])
        wanted[0] = 6.0
        np.testing.assert_array_equal(own, wanted + np.arange(_SIZE)[:, None])


def test_branches_of_each() -> None:
    def of_owner(whole: tf.Tensor) -> tf.Tensor:
        is_owner = tf.equal(marks.replica(), 1)
        mine = tf.cond(is_owner, lambda: whole * 3.0, lambda: whole)
        return marks.addend(tf.where(is_owner, mine, tf.zeros_like(mine)))

    for own in _results(of_owner, [np.full([2, 3], 6.0)], [PARTIAL], _ADDENDS):
        np.testing.assert_array_equal(own, np.full([2, 3], 18.0))


def test_functions_get_addends_and_rows() -> None:
    def of_all(rows: tf.Tensor) -> tf.Tensor:
        summed, _, number = marks.called(
            lambda tensors: [tensors[0] * 10.0, tensors[1], tensors[2]],
            [tf.reduce_sum(rows, 0), rows, tf.constant(7)],
            [tf.TensorSpec([2], tf.float64), tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([], tf.int32)],
        )
        return summed + tf.cast(number, tf.float64)

    class Called(Together):
        def called(self, function: Callable, values: list) -> list:
            seen.extend(len(own) for own in values)
            return [function(own) for own in values]

    seen: list[int] = []
    found = _run(planned(of_all, [_ROWS], [Shard(0)], _SIZE, is_open=True), _OF_EACH, Called(_SIZE))
    assert seen == [3] * _SIZE
    for own, (rows,) in zip(found, _OF_EACH, strict=True):
        np.testing.assert_array_equal(own, 10.0 * rows.sum(0) + 7)
