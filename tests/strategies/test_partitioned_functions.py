"""`tfrep.partition`: functions that are written for one device give its numbers on replicas, which share the work."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane
from raising import refuses
from strategies.own_functions import ran

import tfrep_strategy as tfrep
from tfrep_strategy.errors import DesyncError


def _check(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(got) == len(wanted)
    for own, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas", [2, *in_lane("functions_mirrored", 3)])
@pytest.mark.parametrize("name", ["gan", "compared"])  # All run in test_functions_in_scope.py, by the same way.
def test_programs_on_mirrored_replicas(name: str, replicas: int) -> None:
    wanted = ran(name, tf.function)
    with tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope():
        _check(ran(name, tfrep.partition), wanted)


def _with_other_arguments(strategy: Any) -> list[Any]:
    step = tfrep.partition(lambda first, other: tf.reduce_sum(first) + tf.reduce_sum(other))
    told = []
    with strategy.scope():
        for factor in (2.0, 3.0):  # Functions of one name, which are other programs.
            assert float(tfrep.partition(lambda x, factor=factor: tf.reduce_sum(x * factor))(tf.ones([4]))) == 4.0 * factor
        equal = float(step(tf.ones([4]), tf.ones([1])))
        for first, other in (([5], [5]), ([4], [1])):  # For other sizes it is traced; for these it was called before.
            rows = np.arange(first[0], dtype="float32")
            try:
                step(tf.constant(rows[::-1] if strategy.rank else rows), tf.ones(other))
            except (DesyncError, tf.errors.InvalidArgumentError) as error:
                told.append(str(error))

        @tfrep.partition
        def read(data: tf.data.Dataset) -> tf.Tensor:
            total = tf.zeros([])
            for rows in data:
                total += tf.reduce_sum(rows)
            return total

        try:
            rank = float(strategy.rank)
            read(_numbers(4).map(lambda x: x + rank * tf.cast(tf.size(x) == 2, tf.float32)))  # The second batch differs.
        except tf.errors.InvalidArgumentError as error:
            told.append(str(error))
    return [equal, *told]


def test_arguments_that_differ_between_processes_are_refused(worker_pool: Any) -> None:
    for equal, traced, called, read in worker_pool("tf", 2).run(_with_other_arguments):
        assert "with other arguments:] [a batch of data that it reads]" in read
        assert equal == 5.0
        assert "arguments" in traced
        assert "with other arguments:" in called
        assert "first" in called
        assert "other " not in called.partition("arguments:")[2]


def test_replicas_share_the_work() -> None:
    @tfrep.partition
    def step(x: tf.Tensor) -> tf.Tensor:
        noise = tf.random.stateless_normal([8, 3], [1, 2])
        return tf.reduce_sum(x * noise)

    x = tf.reshape(tf.range(24.0), [8, 3])
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = step(x)
    np.testing.assert_allclose(total, tf.reduce_sum(x * tf.random.stateless_normal([8, 3], [1, 2])), rtol=1e-6)
    told = strategy.explain(step)
    assert " in rows" in told
    assert "Round 1: 1 sum of 4 bytes." in told


def test_where_there_are_no_replicas_it_is_the_function_itself() -> None:
    step = tfrep.partition(lambda x: x + 1.0)
    assert float(step(tf.constant(1.0))) == 2.0
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = strategy.run(lambda: step(tf.constant(1.0)))
        assert [float(x) for x in strategy.experimental_local_results(inside)] == [2.0, 2.0]
        assert float(tf.function(lambda: step(tf.constant(1.0)))()) == 2.0


def test_a_tape_around_it_gets_the_gradient_of_one_device() -> None:
    @tfrep.partition
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(x))

    x = tf.range(6.0)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), tf.GradientTape() as tape:
        tape.watch(x)
        value = loss(x)
    np.testing.assert_allclose(tape.gradient(value, x), 2.0 * x / 6.0)


def _numbers(size: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(6).map(lambda i: tf.cast(i, tf.float32)).batch(size)


def test_a_function_that_reads_data_itself() -> None:
    """Each replica takes its rows of a batch. What comes out of the loop is whole; an element without rows stays so."""
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        total = tf.Variable(0.0)

        @tfrep.partition
        def epoch(data: tf.data.Dataset) -> tf.Tensor:
            seen = tf.zeros([0])
            for rows in data:
                tf.autograph.experimental.set_loop_options(shape_invariants=[(seen, tf.TensorShape([None]))])
                total.assign_add(tf.reduce_sum(rows) * tf.cast(tf.size(rows), tf.float32))
                seen = tf.concat([seen, tf.reshape(rows, [-1])], 0)
            return seen

        for data in (_numbers(4), _numbers(5), _numbers(1), _numbers(2).unbatch(), _numbers(4).take(0)):
            np.testing.assert_array_equal(epoch(data), [x for rows in data for x in np.ravel(rows)])
        np.testing.assert_allclose(total, (6 * 4 + 9 * 2) + (10 * 5 + 5) + 15 + 15)
        assert any("While that sends" in line for line in epoch.describe())

        both = tf.data.Dataset.zip((_numbers(4), _numbers(3)))  # As many batches, of other sizes.

        @tfrep.partition
        def uneven(data: tf.data.Dataset) -> None:
            for x, y in data:
                total.assign_add(tf.reduce_sum(x) - tf.reduce_mean(y))

        total.assign(0.0)
        uneven(both)
        assert float(total) == 15.0 - 1.0 - 4.0


def test_rows_that_are_given_beside_those_that_are_read() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():

        @tfrep.partition
        def outer(given: tf.Tensor, data: Any) -> tf.Tensor:
            total = tf.zeros([])
            for rows in data:
                total += tf.reduce_sum(given[:, tf.newaxis] * rows)
            return total + next(iter(data))[0]

        assert float(outer(tf.range(4.0), _numbers(3))) == 6.0 * 15.0


def test_constants_of_python_are_traced_apart() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        step = tfrep.partition(lambda x, factor, is_added=False: tf.reduce_sum(x) * factor + (1.0 if is_added else 0.0))
        x = np.ones(4, "float32")
        assert [float(step(x, 2.0)), float(step(x, 3.0)), float(step(x, 3.0, is_added=True))] == [8.0, 12.0, 13.0]


def test_a_function_that_is_declared_for_any_number_of_rows() -> None:
    traces = []

    @tfrep.partition
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        traces.append(x.shape)
        return tf.reduce_mean(x, 1) * y + tf.reduce_sum(y)

    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        for rows in (4, 5, 1):
            x, y = np.random.default_rng(rows).normal(size=(2, rows, 2)).astype("float32")
            y = y[:, 0]
            np.testing.assert_allclose(step(x, y), x.mean(1) * y + y.sum(), rtol=1e-5)
    assert traces == [(None, 2)] * len(traces)
    assert len(traces) <= 2  # Of one row nobody knows that it is a row.


def test_xla_compiles_what_lies_between() -> None:
    @tfrep.partition
    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(x)) * x

    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        np.testing.assert_allclose(step(x), np.tanh(x).sum() * x, rtol=1e-5)


def test_objects_that_are_constants_of_a_trace_are_kept() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        step = tfrep.partition(lambda x, options: x * options["factor"].number)

        def given(number: float) -> Any:
            return {"factor": type("Factor", (), {"number": number})()}

        assert [float(step(tf.constant(1.0), given(float(i)))) for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_ragged_and_sparse_arguments() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        step = tfrep.partition(lambda x, y: tf.reduce_sum(x) + tf.sparse.reduce_sum(y))
        assert float(step(tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[0.0, 4.0]]))) == 10.0


def test_what_is_no_function_is_refused() -> None:
    with refuses(function=5):
        tfrep.partition(5)  # type: ignore[arg-type]


def _trained(factor: float) -> np.ndarray:
    """Returns the weights after two steps of a loop, with a rate that is so many times as large."""
    x = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.1 * factor)

    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(rows) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for _ in range(2):
        step(tf.constant(x))
    return np.asarray(model.get_weights()[0])


@pytest.mark.lane("quick")
def test_settings_of_gradients_hold_in_loops() -> None:
    """As in `fit`, the global gradient is transformed, and travels in 16 bits."""
    exact, three_times = _trained(1.0), _trained(3.0)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.gradient_transformers = [lambda gradients: [3.0 * g for g in gradients]]
    with strategy.scope():
        np.testing.assert_allclose(_trained(1.0), three_times, rtol=1e-6)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"], compression="bf16").scope():
        assert 1e-7 < np.abs(_trained(1.0) - exact).max() < 1e-2
