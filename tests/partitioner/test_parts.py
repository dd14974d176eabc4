"""Tensors in parts: what becomes of them, and when the values of sharded weights are gathered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import Together, own_rows, planned

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import Parts, Shard
from tfrep_strategy.partitioner.program import Collective
from tfrep_strategy.partitioner.step import PartitionedStep

_SIZE = 3
_WHOLE = np.arange(1.0, 21.0).reshape(4, 5)
_PARTS = Parts(7, _SIZE, 20, is_read=True)
_FLAT = np.pad(_WHOLE.ravel(), (0, 1), constant_values=np.nan).reshape(_SIZE, 7)
"""The part of each replica, with padding that must not be seen."""
_ROWS = np.arange(24.0).reshape(6, 4)


def _run(step: PartitionedStep, of_each: list) -> list[np.ndarray]:
    inputs = [[tf.constant(x) for x in each] for each in of_each]
    return [own.numpy() for (own,) in step.run(own_rows((3, 0, 3), 6), inputs, Together(_SIZE))]


def _sent(step: PartitionedStep) -> list[Collective]:
    return [node for node in step.nodes if isinstance(node, Collective) and node.kind == "equal rows"]


_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "itself": tf.identity,
    "by elements": lambda w: tf.sqrt(tf.square(w) * 4.0) - w / 2.0,
    "cast": lambda w: tf.cast(tf.cast(w, tf.float32) + 1.0, tf.float64),
    "reshaped": lambda w: tf.reshape(w, [2, -1]),
    "first elements": lambda w: tf.reshape(w, [-1])[:3],
    "other elements": lambda w: tf.reshape(w, [-1])[1:],
    "padded": lambda w: tf.pad(tf.reshape(w, [-1]), [[0, 1]]),
    "padded more": lambda w: tf.pad(tf.reshape(w, [-1]), [[0, 9]]),
    "padded before": lambda w: tf.pad(tf.reshape(w, [-1]), [[1, 0]]),
    "broadcast": lambda w: w + tf.range(5.0, dtype=tf.float64),
    "product": lambda w: tf.matmul(w, w, transpose_b=True),
    "sum": tf.reduce_sum,
    "branch": lambda w: tf.cond(tf.reduce_sum(w) > 0.0, lambda: w * 2.0, lambda: w),
    "loop": lambda w: tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + w), [0, w])[1],
    "function": lambda w: tf.function(lambda x: x * 2.0, autograph=False)(w),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_of_parts(name: str) -> None:
    step = planned(_FUNCTIONS[name], [_WHOLE], [_PARTS], _SIZE, is_open=True)
    for own in _run(step, [[part] for part in _FLAT]):
        np.testing.assert_allclose(own, _FUNCTIONS[name](tf.constant(_WHOLE)), rtol=1e-6)


def test_what_is_computed_element_by_element_stays_in_parts() -> None:
    step = planned(lambda w: tf.reshape(w * 2.0 + w, [-1])[:20] / 3.0, [_WHOLE], [_PARTS], _SIZE, is_open=True)
    (sent,) = _sent(step)
    assert sent.inputs[0].node.type == "RealDiv"


def test_a_replica_takes_its_own_part_without_a_message() -> None:
    def function(whole: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(tf.pad(tf.reshape(whole, [-1]), [[0, 1]]), [_SIZE, 7])
        return tf.reduce_sum(marks.addend(marks.own_row(rows)[:6]))

    step = planned(function, [_WHOLE], [_PARTS], _SIZE, is_open=True)
    assert not _sent(step)
    for own in _run(step, [[part] for part in _FLAT]):
        assert own == np.sum(_FLAT[:, :6])


def test_weights_are_gathered_one_layer_ahead() -> None:
    """The third weight waits for the first layer, and so on; where the direction turns, the last two are still there."""

    def function(rows: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        x = rows
        for weight in weights:
            x = tf.matmul(x, weight)
        for weight in reversed(weights):
            x = tf.matmul(x, weight, transpose_b=True)
        return x

    weights = [np.eye(4) * (i + 1) for i in range(5)]
    parts = Parts(6, _SIZE, 16, is_read=True)
    step = planned(function, [_ROWS, *weights], [Shard(0), *[parts] * 5], _SIZE, is_open=True)
    sent = _sent(step)
    assert len(sent) == 5 + 3
    assert [len(each.inputs) - 1 for each in sent] == [0, 1, *[2] * 6]
    assert [each.level for each in sent] == list(range(8))
    of_each = [np.pad(weight.ravel(), (0, 2)).reshape(_SIZE, 6) for weight in weights]
    rows = [_ROWS[:3], _ROWS[:0], _ROWS[3:]]
    for own in _run(step, [[rows[i], *(weight[i] for weight in of_each)] for i in range(_SIZE)]):
        np.testing.assert_allclose(own, _ROWS * 120.0**2)
