"""Functions of the rows of a batch that are drawn at random: replicas compute together what one device does, and its gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.protocol import Shards, current_step
from tfrep_strategy.keras_integration.synchronous.assigned_values import of_all_replicas
from tfrep_strategy.keras_integration.synchronous.batch_sums import part_of_global

Function = Callable[[Any, Any], Any]  # Of rows of shape [n, 4], and of a weight.
_BATCH = (np.random.RandomState(0).rand(7, 4) + 0.2).astype("float32")
_CUTS = {2: ([4], [7]), 3: ([3, 5], [7, 7])}


def _drawn_rows(draw: random.Random, depth: int) -> Function:
    """Draws a function that gives a number for each row."""
    if not depth:
        return draw.choice([lambda x, v: x[:, 0] * v, lambda x, v: x[:, 1], lambda x, v: ops.sum(x * v, axis=1)])
    one, other, scalar = _drawn_rows(draw, depth - 1), _drawn_rows(draw, depth - 1), _drawn_scalar(draw, depth - 1)
    return draw.choice(
        [
            lambda x, v: ops.square(one(x, v)),
            lambda x, v: ops.sqrt(ops.abs(one(x, v)) + 0.1),
            lambda x, v: ops.sigmoid(one(x, v)),
            lambda x, v: one(x, v) * other(x, v),
            lambda x, v: one(x, v) + other(x, v),
            lambda x, v: one(x, v) - scalar(x, v),
            lambda x, v: one(x, v) / (1.0 + ops.abs(scalar(x, v))),
            lambda x, v: ops.where(x[:, 0] > 0.6, one(x, v), 0.0),
            lambda x, v: ops.maximum(one(x, v), 0.4),
            # These compare rows with each other.
            lambda x, v: ops.flip(one(x, v), axis=0) * other(x, v),
            lambda x, v: ops.cumsum(one(x, v)) / 7.0,
            lambda x, v: ops.softmax(one(x, v), axis=0) + other(x, v),
            lambda x, v: ops.mean(ops.sigmoid(one(x, v)[:, None] - other(x, v)[None]), axis=1),
            lambda x, v: ops.matmul(ops.matmul(x, ops.transpose(x)), one(x, v)) / 7.0,
            lambda x, v: one(x, v) - other(x, v)[0],
        ]
    )


def _drawn_scalar(draw: random.Random, depth: int) -> Function:
    """Draws a function that gives one number."""
    rows = _drawn_rows(draw, max(depth - 1, 0))
    of_rows: list[Function] = [
        lambda x, v: ops.mean(rows(x, v)),
        lambda x, v: ops.sum(rows(x, v)),
        lambda x, v: ops.sum(rows(x, v)) / ops.cast(ops.shape(x)[0], "float32"),
        lambda x, v: tf.reduce_mean(rows(x, v)) * v,
    ]
    if not depth:
        return draw.choice(of_rows)
    one, other = _drawn_scalar(draw, depth - 1), _drawn_scalar(draw, depth - 1)
    return draw.choice(
        [
            *of_rows,
            lambda x, v: one(x, v) + other(x, v),
            lambda x, v: one(x, v) * other(x, v),
            lambda x, v: one(x, v) / (1.0 + ops.abs(other(x, v))),
            lambda x, v: ops.sqrt(ops.abs(one(x, v)) + 0.1),
            lambda x, v: ops.maximum(one(x, v), 0.7),
            lambda x, v: 0.5 * ops.max(rows(x, v)) + one(x, v),
            lambda x, v: ops.std(rows(x, v) + x[:, 2]) + one(x, v),
            lambda x, v: one(x, v) - 2.0 * ops.var(rows(x, v)),
            lambda x, v: 0.1 * tf.reduce_sum(tf.linalg.matvec(x, rows(x, v), transpose_a=True)) + one(x, v),
            lambda x, v: ops.log(1.0 + ops.square(one(x, v))),
            lambda x, v: ops.exp(-ops.abs(one(x, v))) * v,
            lambda x, v: ops.sum(ops.mean(x * rows(x, v)[:, None], axis=0) ** 2) + one(x, v),
            # These compare rows with each other.
            lambda x, v: ops.median(rows(x, v)) + one(x, v),
            lambda x, v: ops.mean(tf.boolean_mask(rows(x, v), x[:, 0] > 0.6)) * other(x, v),
            lambda x, v: ops.sum(ops.top_k(rows(x, v), 2)[0]) + one(x, v),
        ]
    )


def _of_replicas(function: Function, parts: list[np.ndarray]) -> tuple[float, list[float], list[float]]:
    """Returns the value of all replicas together; on each, the global gradient, and what it would assign."""
    strategy = tfrep.MirroredStrategy([f"CPU:{i}" for i in range(len(parts))])
    with strategy.scope():
        weight = tf.Variable(1.3)

    def replica(part: Any) -> Any:
        step, context = current_step(), tf.distribute.get_replica_context()
        assert step is not None
        own = weight.values[int(tf.get_static_value(context.replica_id_in_sync_group))]
        with tf.GradientTape() as tape:
            value = part_of_global(step, function(part, weight))
        gradient = tape.gradient(value, own, unconnected_gradients="zero")
        total = strategy.extended.sum_over_replicas(step.share.silenced([gradient]))[0]
        assigned = of_all_replicas(function(part, weight))
        assert assigned is not None
        return value, total, assigned

    @tf.function(input_signature=[Shards((tf.TensorSpec([None, 4]),) * len(parts), tf.TensorSpec([], tf.int64))])
    def of_all(batch: Shards) -> Any:
        return strategy.run(replica, args=(batch,))

    value, *others = of_all(Shards(tuple(map(tf.constant, parts)), tf.constant(len(_BATCH), tf.int64)))
    gradients, assigned = ([float(each) for each in strategy.experimental_local_results(other)] for other in others)
    return float(strategy.reduce("SUM", value)), gradients, assigned


@pytest.mark.parametrize("draws", [6, *in_lane("drawn", 150)])
def test_drawn_values(draws: int) -> None:
    for seed in range(draws):
        draw = random.Random(1000 * draws + seed)
        function = _drawn_scalar(draw, draw.choice([2, 3, 4]))
        cut = draw.choice(_CUTS[draw.choice([2, 3])])
        weight = tf.Variable(1.3)
        with tf.GradientTape() as tape:
            wanted = function(tf.constant(_BATCH), weight)
        gradient = float(tape.gradient(wanted, weight, unconnected_gradients="zero"))
        value, gradients, assigned = _of_replicas(function, np.split(_BATCH, cut))
        told = f"seed {1000 * draws + seed}, cut at {cut}"
        assert [value, *assigned] == pytest.approx([float(wanted)] * (1 + len(assigned)), rel=2e-4, abs=2e-4), told
        assert gradients == pytest.approx([gradient] * len(gradients), rel=2e-4, abs=2e-4), told
