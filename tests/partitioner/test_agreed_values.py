"""Where ranks may round otherwise what each of them computes, all go on with what replica 0 has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import Together, own_rows, planned

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import REPLICATE

_DRAWN = np.random.default_rng(0)
_SQUARE = _DRAWN.random((4, 4))
_OF_EACH = [_SQUARE + i for i in range(3)]
"""What is the same on all replicas stands here for what each has rounded in its own way, by far."""


def _results(function: Callable[[tf.Tensor], tf.Tensor]) -> tuple[list[np.ndarray], Together]:
    """Returns what each replica gets of a function, and the transport."""
    transport = Together(len(_OF_EACH))
    step = planned(function, [_SQUARE], [REPLICATE], len(_OF_EACH), is_open=True)
    results = step.run(own_rows([2, 1, 1], 4), [[tf.constant(x)] for x in _OF_EACH], transport)
    return [own.numpy() for (own,) in results], transport


def _on_one_device(function: Callable[[tf.Tensor], tf.Tensor], x: np.ndarray) -> np.ndarray:
    return tf.function(function, autograph=False)(tf.constant(x)).numpy()


def _of_matrices(x: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matmul(x, x)


def _branch(x: tf.Tensor) -> tf.Tensor:
    is_small = tf.reduce_sum(_of_matrices(x)) < float(np.sum(_SQUARE @ _SQUARE)) + 1.0
    return tf.cond(is_small, lambda: tf.ones([2]), lambda: tf.zeros([2]))


_AGREED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "a gradient": lambda x: marks.gradient(_of_matrices(x)),
    "a scalar that a step returns": lambda x: tf.reduce_sum(_of_matrices(x)),
    "which branch is taken": _branch,
    "a loop that rounds": lambda x: marks.gradient(tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y @ y / 9.0), (0, x))[1]),
    "numbers from Python": lambda x: marks.gradient(tf.numpy_function(lambda y: y.sum(), [x], tf.float64, stateful=False)),
    "one tensor of several": lambda x: marks.gradient(tf.identity_n([x, _of_matrices(x)])[1]),
}


@pytest.mark.parametrize("name", _AGREED)
def test_all_have_what_replica_0_has(name: str) -> None:
    for own in _results(_AGREED[name])[0]:
        np.testing.assert_array_equal(own, _on_one_device(_AGREED[name], _SQUARE))


_SAME: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "elements": lambda x: marks.gradient(tf.exp(x) * 2.0 - tf.transpose(x)),
    "a norm": lambda x: marks.gradient(x * tf.math.rsqrt(tf.reduce_sum(tf.square(x)))),
    "sizes": lambda x: marks.gradient(x * tf.cast(tf.size(_of_matrices(x)), x.dtype)),
    "another tensor of several": lambda x: marks.gradient(tf.identity_n([x, _of_matrices(x)])[0]),
    "numbers that are drawn": lambda x: marks.gradient(x * tf.random.stateless_normal([], [1, 2], dtype=tf.float64)),
}


@pytest.mark.parametrize("name", _SAME)
def test_what_rounds_alike_everywhere_is_not_sent(name: str) -> None:
    results, transport = _results(_SAME[name])
    assert transport.rounds == 0
    np.testing.assert_allclose(results[2], _on_one_device(_SAME[name], _OF_EACH[2]), rtol=1e-14)


@pytest.mark.parametrize("shape", [(1 << 21,), (3, 700, 1000), (65537,)])
@pytest.mark.parametrize("sum_", [tf.reduce_sum, tf.reduce_mean, tf.nn.l2_loss], ids=["sum", "mean", "half of the squares"])
def test_large_sums_do_not_depend_on_threads(sum_: Callable[..., tf.Tensor], shape: tuple[int, ...]) -> None:
    x = _DRAWN.random(shape)
    step = planned(sum_, [x], [REPLICATE], 1, is_open=True)
    transport = Together(1)
    ((found,),) = step.run(own_rows([1], 1), [[tf.constant(x)]], transport)
    np.testing.assert_allclose(found.numpy(), sum_(tf.constant(x)).numpy(), rtol=1e-12)
    # What cannot be added up in steps, since its size is a prime number, is sent.
    assert transport.rounds == (shape == (65537,))
