"""Trains slowly: `goes_slowly.py EPOCHS SECONDS`, with so many seconds for each of seven steps of an epoch.

Rank 0 prints what it learned.
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
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
slow = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(seconds))
history = model.fit(data, epochs=epochs, verbose=0, callbacks=[slow])
if tfrep.is_chief():
    weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    print("FOUND " + json.dumps({"weights": weights, "losses": history.history["loss"], "replicas": replicas}), flush=True)
