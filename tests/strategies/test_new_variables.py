"""What ranks tell each other of variables that they have made."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.ring import RingCommunicator

PART = 32 << 20
_SHAPES = [(3,), (2_000_000,), (3_000_000, 2), (), (5_000_000, 4), (1, 10_000_000), (300,)]


def make(strategy: Any) -> tuple[list[tuple[str, int]], list[bool], int]:
    """Makes variables with values of each rank; returns what is sent, and whether each has rank 0's values."""
    sent, run = [], RingCommunicator._run

    def noted(self: Any, operation: Any, kind: str, tensor: tf.Tensor, *args: Any, **options: Any) -> tf.Tensor:
        sent.append((kind, int(tf.size(tensor)) * tensor.dtype.size))
        return run(self, operation, kind, tensor, *args, **options)

    def value(shape: tuple[int, ...], rank: int) -> tf.Tensor:
        return tf.random.stateless_uniform(shape, [rank, len(shape)])

    strategy.extended.synchronize_new_variables()  # Those of earlier tests.
    RingCommunicator._run = noted  # type: ignore[method-assign]
    try:
        with strategy.scope():
            made = [tf.Variable(value(shape, strategy.rank)) for shape in _SHAPES]
        strategy.extended.synchronize_new_variables()  # An earlier test may have stayed in scope.
    finally:
        RingCommunicator._run = run  # type: ignore[method-assign]
    equal = [bool(tf.reduce_all(v == value(shape, 0))) for v, shape in zip(made, _SHAPES, strict=True)]
    return sent, equal, sum(4 * v.shape.num_elements() for v in made)


def test_values_travel_in_parts(worker_pool: Any) -> None:
    for sent, equal, total in worker_pool("tf", 2).run(make):
        assert all(equal)
        assert sent[0] == ("all_gather", 24)  # A digest of their shapes.
        assert {kind for kind, _ in sent[1:]} == {"all_reduce"}
        sizes = [size for _, size in sent[1:]]
        assert sum(sizes) == total
        whole_row = 40_000_000
        assert max(sizes) == whole_row
        assert max(set(sizes) - {whole_row}) <= PART


def accumulate(strategy: Any) -> list[float]:
    """Makes a variable in a scope within that of a whole run, as a script under `tfrep run` does, and adds to it in a function."""
    with strategy.scope():
        with strategy.scope():
            total = tf.Variable([0.0], trainable=False)

        @tf.function
        def add() -> None:
            strategy.run(lambda: total.assign_add([strategy.rank + 1.0]))

        add()
        tf.Variable(0.0)
        strategy.run(lambda: None)  # At the latest, new variables are given rank 0's values now.
        return [float(each[0]) for each in strategy.experimental_local_results(total)]


def test_what_a_step_has_assigned_stays(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(accumulate) == [[1.0], [2.0]]
