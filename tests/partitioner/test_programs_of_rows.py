"""Programs that compute a number from the rows of a batch give replicas the value of one device, and its gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from lanes import in_lane
from partitioner.programs_of_rows import CALLED, PROGRAMS
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import REPLICATE, Shard

_ROWS = np.random.RandomState(0).randn(6, 4, 2).astype("float32")


def _with_gradient(function: Callable[..., Any]) -> Callable[..., list[tf.Tensor]]:
    def value_and_gradient(x: tf.Tensor, weight: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(weight)
            value = function(x, weight)
        return [value, tape.gradient(value, weight, unconnected_gradients="zero")]

    return value_and_gradient


def _check(function: Callable[..., Any], rows: np.ndarray, counts: tuple[int, ...], is_open: bool = True) -> None:
    given = _with_gradient(function), [rows, np.float32(1.2)], [Shard(0), REPLICATE]
    worst, *_ = differences(*given, counts, is_open=is_open, in_function=True)
    assert worst < 2e-4, worst


@pytest.mark.parametrize("parts", ["4 2", *in_lane("drawn", "6 0", "2 3 1")])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, each in PROGRAMS.items() for name in each])
def test_programs(kind: str, name: str, parts: str) -> None:
    program = PROGRAMS[kind][name]
    _check(lambda x, weight: weight**2 * program(weight * x), _ROWS, tuple(map(int, parts.split())))


@pytest.mark.parametrize("parts", ["4 3", *in_lane("drawn", "7 0", "2 3 2")])
@pytest.mark.parametrize("name", CALLED)
def test_calls(name: str, parts: str) -> None:
    counts = tuple(map(int, parts.split()))
    worst, *_ = differences(CALLED[name], [_BATCH], [Shard(0)], counts, in_function=True)
    assert worst < 2e-5, worst


Function = Callable[[Any, Any], Any]  # Of rows of shape [n, 4], and of a weight.
_BATCH = (np.random.RandomState(0).rand(7, 4) + 0.2).astype("float32")
_COUNTS = ((4, 3), (7, 0), (3, 2, 2), (7, 0, 0))


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


@pytest.mark.parametrize("draws", [6, *in_lane("drawn", 150)])
def test_drawn_programs(draws: int) -> None:
    for seed in range(draws):
        draw = random.Random(1000 * draws + seed)
        function = _drawn_scalar(draw, draw.choice([2, 3, 4]))
        _check(function, _BATCH, draw.choice(_COUNTS), is_open=draw.choice([True, False]))
