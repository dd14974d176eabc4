"""A collective in a function waits for its own tensors, and not for those before it; calls and loops stay in order."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

_PATIENCE = 20.0


def a_later_bucket_ends_first(strategy: Any) -> list[float]:
    communicator = strategy.communicator
    second_has_ended = threading.Event()

    def wait(value: np.ndarray) -> np.ndarray:
        return np.float32(second_has_ended.wait(_PATIENCE)) * value

    def note(value: np.ndarray) -> np.ndarray:
        second_has_ended.set()
        return value

    @tf.function
    def inner(x: tf.Tensor) -> list[tf.Tensor]:
        late = tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32, stateful=False), [])
        first, second = communicator.all_reduce([late])[0], communicator.all_reduce([x])[0]
        return [first, tf.numpy_function(note, [second], tf.float32, stateful=False)]

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return inner(x)

    return [float(total) for total in step(tf.constant(1.0 + strategy.rank))]


def loops_and_calls(strategy: Any) -> list[list[float]]:
    communicator, rank = strategy.communicator, strategy.rank

    @tf.function
    def both(x: tf.Tensor) -> tf.Tensor:
        communicator.all_reduce([x * 0.0])  # Nobody uses it; the other rank waits for it nevertheless.
        sums = communicator.all_reduce([x])[0] + communicator.all_reduce([10.0 * x])[0]
        return sums if rank else tf.identity(sums)

    @tf.function
    def step() -> tf.Tensor:
        totals = tf.TensorArray(tf.float32, 40)
        x = tf.constant(float(rank))

        def body(i, totals):
            value = x + tf.cast(i, tf.float32)
            plain = communicator.all_reduce([value])[0]
            return i + 1, totals.write(i, plain + both(value) + both(value + 1.0))

        return tf.while_loop(lambda i, _: i < 40, body, [tf.constant(0), totals])[1].stack()

    return [step().numpy().tolist() for _ in range(2)]


def loops_branches_and_slow_calls(strategy: Any) -> list[float]:
    """Does what Keras does with `steps_per_execution` and data whose length nobody knows."""
    communicator, rank = strategy.communicator, strategy.rank

    def slow(value: np.ndarray) -> np.ndarray:
        time.sleep(0.01 * rank)
        return value

    @tf.function
    def called(x: tf.Tensor) -> tf.Tensor:
        late = tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32, stateful=False), [])
        return communicator.all_reduce([late])[0]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        def body(i, total):
            total += tf.cond(x > 0.0, lambda: called(x), lambda: x)
            return i + 1, total + tf.cond(i < 9, lambda: communicator.all_reduce([tf.stack([x, x])])[0][0], lambda: x)

        return tf.while_loop(lambda i, _: i < 10, body, [tf.constant(0), tf.constant(0.0)])[1]

    return [float(step(tf.constant(1.0 + rank))) for _ in range(2)]


@pytest.mark.parametrize("communicator", ["horovod", "tf", "shared_memory"])
def test_loops_wait_for_the_functions_that_they_call(communicator: str, worker_pool: Any) -> None:
    for rank, found in enumerate(worker_pool(communicator, 2).run(loops_branches_and_slow_calls)):
        assert found == [19 * 3.0 + 1.0 + rank] * 2


@pytest.mark.parametrize("communicator", ["tf", *in_lane("wires", "horovod")])
def test_order_of_collectives(communicator: str, worker_pool: Any) -> None:
    pool = worker_pool(communicator, 2)
    for found in pool.run(loops_and_calls):
        np.testing.assert_array_equal(found, [[(2 * i + 1) * 12 + (2 * i + 3) * 11 for i in range(40)]] * 2)
    for found in pool.run(a_later_bucket_ends_first):
        assert found == [3.0, 3.0]


def gradients_that_wait_for_a_sum(strategy: Any, compression: str | None) -> list[np.ndarray]:
    """Trains a step. On rank 0, the gradient of the first layer waits until that of the last one is summed over the ranks.

    Rank 1 notes nothing: what functions of Python return is that of rank 0.
    """
    import keras

    last_is_summed = threading.Event()

    def wait(gradient: np.ndarray) -> np.ndarray:
        return np.float32(strategy.rank == 1 or last_is_summed.wait(_PATIENCE)) * gradient

    def note(gradient: np.ndarray) -> np.ndarray:
        last_is_summed.set()
        return gradient

    def called(function: Any, gradient: tf.Tensor) -> tf.Tensor:
        # A stateful operation would wait for those before it in the program.
        return tf.ensure_shape(tf.numpy_function(function, [gradient], tf.float32, stateful=False), gradient.shape)

    @tf.custom_gradient
    def waiting(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda gradient: called(wait, gradient)

    class Noting(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(called(note, gradient) if "last" in variable.name else gradient, variable, learning_rate)

    with strategy.scope():
        layers = [
            keras.layers.Dense(3, kernel_initializer="ones", name="first"),
            keras.layers.Lambda(waiting, output_shape=(3,)),
            keras.layers.Dense(1, kernel_initializer="ones", name="last", use_bias=False),
        ]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(Noting(0.5), loss=lambda y, prediction: prediction, jit_compile=False)
    usual, strategy.bucket_bytes = strategy.bucket_bytes, 4  # Each gradient is a bucket.
    strategy.compression = compression
    model.fit(np.array([[1.0, 2.0], [3.0, 4.0]], "float32"), np.zeros((2, 1)), batch_size=2, verbose=0)
    strategy.bucket_bytes, strategy.compression = usual, None
    return model.get_weights()


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("communicator", ["horovod", "tf", *in_lane("wires", "shared_memory")])
def test_a_sum_overlaps_the_backward_pass(communicator: str, compression: str | None, worker_pool: Any) -> None:
    pool = worker_pool(communicator, 2)
    for kernel, bias, last in pool.run(gradients_that_wait_for_a_sum, compression):
        # The gradients are the mean inputs of each layer.
        np.testing.assert_allclose(kernel, [[0.0] * 3, [-0.5] * 3])
        np.testing.assert_allclose(bias, [-0.5] * 3)
        np.testing.assert_allclose(last, [[-1.5]] * 3)
