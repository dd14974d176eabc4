"""What ranks compute each for itself stays the same on all of them, whatever the number of their threads."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import WorkerPool

_X = np.random.RandomState(0).rand(64, 8, 8, 2).astype("float32")
_STEPS = 1000

pytestmark = pytest.mark.lane("wires")


class _Mixes(keras.layers.Layer):
    """Has no rule for its rows: behind it, each rank computes with all of them."""

    def call(self, x: Any) -> Any:
        columns = tf.transpose(tf.reshape(x, [-1, 8 * 8 * 2]))
        mixed = tf.math.real(tf.signal.ifft(0.999 * tf.signal.fft(tf.cast(columns, tf.complex64))))
        return tf.reshape(tf.transpose(mixed), [-1, 8, 8, 2])


def _train(strategy: Any) -> tuple[int, list[Any], dict[str, Any]]:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        convolution = keras.layers.Conv2D(8, 3, padding="same", activation="tanh")
        layers = [_Mixes(), convolution, keras.layers.Conv2D(8, 3, 2, activation="tanh"), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((8, 8, 2)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-4, clipnorm=0.5), "mse")
    epochs = _STEPS // (len(_X) // 16)
    history = model.fit(_X, _X[:, :1, 0, 0], 16, epochs=epochs, shuffle=False, verbose=0).history
    # The kernel for the gradient of a convolution divides its sum among threads (oneDNN, TensorFlow 2.21).
    image, sent = tf.constant(_X[:16]), tf.constant(_X[:16, ..., :1])
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=image, filter_sizes=[3, 3, 2, 1], out_backprop=sent, strides=[1, 1, 1, 1], padding="SAME"
    )
    return hash(gradient.numpy().tobytes()), [v.numpy() for v in model.variables], history


def test_a_thousand_steps_on_ranks_with_other_numbers_of_threads() -> None:
    environs = [{"TF_NUM_INTRAOP_THREADS": str(number), "PYTHONHASHSEED": "0"} for number in (1, 5)]
    with WorkerPool("tf", 2, environs=environs) as pool:
        (kernel, first, history), (other_kernel, second, other_history) = pool.run(_train)
    assert kernel != other_kernel, "Kernels do not depend on threads, so that nothing was tested."
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert history == other_history
