"""Trains; rank 1 computes for so many seconds while it holds Python's lock, inside an epoch: `holds_the_lock.py SECONDS`."""

import json
import os
import sys
import time

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
        usual, end = sys.getswitchinterval(), time.monotonic() + int(sys.argv[1])
        sys.setswitchinterval(1000)  # No other thread gets the lock, as while native code computes that does not release it.
        while time.monotonic() < end:
            pass
        sys.setswitchinterval(usual)


callback = keras.callbacks.LambdaCallback(on_train_batch_begin=hold)
history = model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=30, verbose=0, callbacks=[callback])
print("FOUND " + json.dumps({"losses": history.history["loss"], "weights": [w.ravel().tolist() for w in model.get_weights()]}))
