"""A script for `tfrep verify`: it trains with `fit` and in a loop of its own, and may have a fault, which its argument names."""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

fault = sys.argv[1] if len(sys.argv) > 1 else ""
has_replicas = os.environ["TFREP_NUM_REPLICAS"] == "2"
if fault == "nothing to compare":
    sys.exit()
if fault == "fails":
    raise ValueError("the script is wrong")
if fault == "a mean for a sum":
    import pytest
    from partitioner import wrong_rules

    wrong_rules.misled(pytest.MonkeyPatch(), wrong_rules.TALK["a mean is taken for a sum"], 0)


class Changes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if fault == "a callback" and has_replicas:
            self.model.layers[-1].bias.assign_add([0.01])


rows = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
model = keras.Sequential(
    [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
)
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(rows, rows[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[Changes()])
assert len(history.history["loss"]) == 2
if tfrep.is_chief():
    os.mkdir("figures")  # Fails where an earlier run has made it.
print("predicted", model.predict(rows[:10], verbose=0).shape)

optimizer = keras.optimizers.SGD(0.1)


@tfrep.partition
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - x[:, :1]) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for batch in tf.data.Dataset.from_tensor_slices(rows).batch(16):
    train_step(batch)
