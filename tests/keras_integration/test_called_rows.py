"""What loops, branches and functions of a step make of rows: sums, means, mixed rows, or what each row has for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.batch_sums import compares_rows
from tfrep_strategy.keras_integration.synchronous.row_growth import growth_of, note_global
from tfrep_strategy.shares import Share

NO_STRATEGY: Any = None


def _coin() -> tf.Tensor:
    return tf.random.uniform([]) > 0.5


def _numbers(x: tf.Tensor, step: Any) -> tf.Tensor:
    return tf.random.stateless_normal(tf.shape(x), tf.stack([step, 3]))


def _compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return tf.function(function, jit_compile=True)


def _turns(turn: Callable[[Any, Any], Any], start: Any) -> Any:
    return ops.fori_loop(0, 3, lambda i, value: turn(ops.cast(i + 1, "float32"), value), start)


def _in_python(function: Callable[[np.ndarray], np.ndarray], x: tf.Tensor, shape: Any) -> tf.Tensor:
    result = tf.numpy_function(function, [x], tf.float32)
    result.set_shape(shape)
    return result


def _until(x: Any, is_enough: Callable[[Any], Any]) -> Any:
    return tf.while_loop(lambda z: tf.logical_not(is_enough(z)), lambda z: (0.5 * z,), (x,))[0]


def _by_index(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], lambda i, total: (i + 1, total + x[i, 0]), (0, 0.0))[1]


def _attend(x: Any) -> Any:
    rows = ops.reshape(x, (-1, 2, 2))
    return _turns(lambda _, z: ops.matmul(ops.softmax(ops.matmul(z, ops.transpose(rows, (0, 2, 1)))), rows), rows)


def _second_turn_mixes(x: Any) -> Any:
    """The first turn begins with zeros, the second one with what the first one has put together."""

    def turn(i: Any, v: Any) -> Any:
        return i + 1, tf.linalg.matvec(x, tf.linalg.matvec(x, v) + 1.0, transpose_a=True)

    return tf.while_loop(lambda i, _: i < 2, turn, (0, tf.zeros(4)))[1]


def _from_a_global_value(x: Any) -> Any:
    total = note_global(tf.reduce_sum(x))
    return _turns(lambda i, z: z + i * total, x)


def _forward_gradient(x: Any) -> Any:
    weights = tf.ones([4, 1])
    with tf.autodiff.ForwardAccumulator([weights], [weights]) as accumulator:
        loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
    return accumulator.jvp(loss)


def _until_a_row_says(x: Any) -> Any:
    return tf.while_loop(lambda i, z: i < 1.0 + tf.abs(x[0, 0]), lambda i, z: (i + 1.0, 0.5 * z), (0.0, x))[1]


def _behind_a_chain_of_seeds(x: Any) -> Any:
    seed = tf.constant([3, 4])
    for _ in range(40):
        seed, own = tf.unstack(tf.random.split(seed, 2))
    return x + tf.random.stateless_uniform(tf.shape(x), own)


def _chosen(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: _compiled(function)(tf.boolean_mask(x, x[:, 0] > 0))


RESULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "means added up in a loop": ("mean", lambda x: _turns(lambda i, a: 0.9 * a + ops.mean(i * x**2), ops.ones(()))),
    "sums added up in a loop": ("sum", lambda x: _turns(lambda i, a: a + ops.sum(i * x**2), ops.zeros(()))),
    "a count": ("sum", lambda x: _turns(lambda i, a: a + ops.sum(ops.cast(x > i, "int32")), ops.zeros((), "int32"))),
    "a mean in one branch": ("mean", lambda x: tf.cond(_coin(), lambda: tf.reduce_mean(x), lambda: 0.5)),
    "a sum in a compiled function": ("sum", lambda x: _compiled(tf.reduce_sum)(x)),
    "a sum of all means by their number": ("mean", lambda x: _compiled(lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"))(x)),
    "a loop in a loop": ("sum", lambda x: _turns(lambda _, a: _turns(lambda i, b: b + ops.sum(i * x), a), ops.zeros(()))),
    "sums added to a weight": ("mixed", lambda x: _turns(lambda i, a: a + ops.sum(i * x**2), ops.ones(()))),
    "a mean or a sum": ("mixed", lambda x: tf.cond(_coin(), lambda: ops.mean(x), lambda: ops.sum(x))),
    "a product of means": ("mixed", lambda x: _turns(lambda i, a: a * ops.mean(i * x**2), ops.ones(()))),
    "a root in a compiled function": ("mixed", lambda x: _compiled(lambda x: tf.sqrt(tf.reduce_mean(x**2)))(x)),
    "a maximum": ("mixed", lambda x: _turns(lambda i, a: ops.maximum(a, i * ops.max(x)), ops.zeros(()))),
    "a mean or a count": ("mixed", lambda x: tf.cond(_coin(), lambda: ops.mean(x), lambda: ops.cast(ops.shape(x)[0], "float32"))),
    "a mean of all or rows": ("mixed", lambda x: tf.cond(_coin(), lambda: ops.mean(x, axis=0, keepdims=True), lambda: x)),
    "a sum or nothing": ("sum", lambda x: tf.cond(_coin(), lambda: ops.sum(x**2), lambda: 0.0)),
    "a mean of chosen rows": ("mixed", _chosen(tf.reduce_mean)),
    "a row decides over turns": ("mixed", _until_a_row_says),
    "numbers of one seed in a loop": ("mixed", lambda x: _turns(lambda i, z: z + _numbers(z, tf.cast(i, tf.int32)), x)),
    "numbers of one seed in a branch": ("mixed", lambda x: tf.cond(_coin(), lambda: x, lambda: _numbers(x, 5))),
    "numbers of a chain of seeds": ("mixed", _behind_a_chain_of_seeds),
    "normalized in a loop": ("mixed", lambda x: _turns(lambda i, z: i * z / ops.sum(z, axis=0), x)),
    "normalized in a loop in a loop": ("mixed", lambda x: _turns(lambda _, y: _turns(lambda i, z: i * z / ops.sum(z, 0), y), x)),
    "normalized in a branch": ("mixed", lambda x: tf.cond(_coin(), lambda: x, lambda: x - ops.mean(x, axis=0))),
    "compared in a branch": ("mixed", lambda x: ops.inner(x, x)),
    "reversed in a function": ("mixed", lambda x: _compiled(lambda x: tf.reverse(x, [0]))(x)),
    "rows decide for a branch": ("mixed", lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x)),
    "rows decide over turns": ("mixed", lambda x: _until(x, lambda z: tf.reduce_max(z) < 0.1)),
    "from row to row": ("mixed", lambda x: tf.scan(lambda a, row: tf.tanh(a + row), x, initializer=tf.zeros(4))),
    "all rows into one": ("mixed", lambda x: tf.foldl(lambda a, row: tf.tanh(a + row), x, initializer=tf.zeros(4))),
    "one row after the other": ("mixed", _by_index),
    "from the second turn on": ("mixed", _second_turn_mixes),
    "a forward gradient": ("mixed", _forward_gradient),
    "a number of Python's": ("mixed", lambda x: _in_python(lambda rows: np.float32(rows.mean()), x, [])),
    "something of Python's": ("mixed", lambda x: tf.numpy_function(lambda rows: np.float32(rows.mean()), [x], tf.float32)),
    "rows of Python's": ("rows", lambda x: _in_python(lambda rows: rows**2, x, [None, 4])),
    "each row in a loop": ("rows", lambda x: _turns(lambda i, z: i * z / ops.sum(z, axis=1, keepdims=True), x)),
    "each row in a map": ("rows", lambda x: tf.map_fn(lambda row: row / tf.reduce_sum(row), x)),
    "each row, and its place": ("rows", lambda x: _compiled(tf.gather)(x, tf.range(tf.shape(x)[0]))),
    "each row in a branch": ("rows", lambda x: tf.cond(_coin(), lambda: x, lambda: tf.nn.softmax(x))),
    "each row in a function": ("rows", lambda x: _compiled(lambda x: tf.cumsum(x, 1))(x)),
    "attention of each row in a loop": ("rows", _attend),
    "with what all replicas have alike": ("rows", _from_a_global_value),
    "in time": ("time", lambda x: tf.scan(lambda a, now: 0.5 * (a + now), tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2]))),
}


@pytest.mark.parametrize(("wanted", "function"), RESULTS.values(), ids=RESULTS)
def test_results(wanted: str, function: Callable[[Any], Any]) -> None:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 4])])
    def traced(x: tf.Tensor) -> tf.Tensor:
        value = function(x)
        while value.op.type == "Identity":
            value = value.op.inputs[0]
        step = Step(NO_STRATEGY, Share.equal(2))
        grows = growth_of(step, value)
        axis = grows.axis(value)
        if compares_rows(step, value):
            found.append("mixed")
        elif axis is not None:
            found.append(("rows", "time")[axis])
        else:
            found.append(grows.powers.reduction(value))
        return value

    found: list[str] = []
    traced.get_concrete_function()
    assert found == [wanted]


def test_mapped_rows_are_added_up() -> None:
    found: list[Any] = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 4])])
    def traced(x: tf.Tensor) -> tf.Tensor:
        value = tf.reduce_sum(tf.map_fn(tf.reduce_max, x))
        found.append(growth_of(Step(NO_STRATEGY, Share.equal(2)), value).powers.reduction(value))
        return value

    traced.get_concrete_function()
    assert found == ["sum"]
