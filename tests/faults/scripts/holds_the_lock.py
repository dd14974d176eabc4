"""Trains; rank 1 spends so many seconds in native code that holds Python's lock, inside an epoch: `holds_the_lock.py SECONDS`."""

import ctypes
import json
import os
import sys

import keras
import numpy as np

import tfrep_strategy as tfrep

keras.utils.set_random_seed(0)
x = np.random.RandomState(0).rand(64, 8).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
steps = []


def hold(batch, logs=None):
    steps.append(batch)
    if len(steps) == 20 and os.environ.get("TFREP_STRATEGY") and tfrep.auto_strategy().rank == 1:
        ctypes.PyDLL(None).sleep(int(sys.argv[1]))


callback = keras.callbacks.LambdaCallback(on_train_batch_begin=hold)
history = model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=30, verbose=0, callbacks=[callback])
print("FOUND " + json.dumps({"losses": history.history["loss"], "weights": [w.ravel().tolist() for w in model.get_weights()]}))
