"""Makes the mistake that its argument names. Run with two ranks."""

import sys

import keras
import numpy as np
import tensorflow as tf

x = np.arange(64.0, dtype="float32").reshape(16, 4)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


@tf.function
def loss(rows):
    return tf.reduce_sum(model(tf.tile(rows, [2**40, 1])))


match sys.argv[1]:
    case "raises":
        raise ValueError("seven")
    case "reads its own rows":
        own = x[tf.distribute.get_strategy().rank :: 2]
        model.fit(own, own[:, :1], verbose=0)
    case "needs too much":
        loss(tf.constant(x))
