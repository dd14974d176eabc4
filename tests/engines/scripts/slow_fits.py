"""Waits before each batch where Slurm starts it for the first time. Rank 0 prints what it has learned.

The argument is for how many seconds. Slurm warns it meanwhile of the end of its time.
"""

import json
import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(50, seed=3).batch(8)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])


class Slow(keras.callbacks.Callback):
    """Waits before each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(float(sys.argv[1]))


fits = []
for _ in range(2):
    history = model.fit(data, epochs=5, verbose=0, callbacks=[Slow()]).history
    weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
    fits.append([weights, *(list(map(float, history[name])) for name in sorted(history))])
if tfrep.is_chief():
    print("FOUND " + json.dumps({"fits": fits}), flush=True)
