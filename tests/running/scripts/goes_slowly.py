"""Trains slowly: `goes_slowly.py EPOCHS SECONDS [dropout]`, with so many seconds for each of seven steps of an epoch.

With dropout and batch normalization of replicas it learns something else on another number of them. Rank 0 prints what it learned
from what: the mean label of each epoch until each of its steps.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

epochs, seconds = int(sys.argv[1]), float(sys.argv[2])
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(50, seed=3).batch(8)
drops = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)] if sys.argv[3:] == ["dropout"] else []
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "tanh"), *drops, keras.layers.Dense(1)])


class Slow(keras.callbacks.Callback):
    """Slows steps down, and remembers what they have seen, also when all ranks start again."""

    def __init__(self):
        super().__init__()
        self.labels = []

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(seconds)

    def on_train_batch_end(self, batch, logs=None):
        self.labels.append(float(logs["label"]))


def label(y_true, y_pred):
    """A metric that shows the data."""
    return y_true[:, 0]


slow = Slow()
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[label])
history = model.fit(data, epochs=epochs, verbose=0, callbacks=[slow])
if tfrep.is_chief():
    weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    found = {"weights": weights, "losses": history.history["loss"], "replicas": replicas}
    print("FOUND " + json.dumps(found | {"labels": slow.labels, "steps": int(model.optimizer.iterations)}), flush=True)
