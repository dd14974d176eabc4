"""Trains and evaluates, and tells in a file of its own what it does. Rank 0 prints what it has learned."""

import json
import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

SECONDS = 0.02
"""How long a step takes at least, so that a fault can be aimed at it."""
told = Path("told", str(os.getpid()))
told.parent.mkdir(exist_ok=True)


def tell(what):
    told.write_text(what)


class Tell(keras.callbacks.Callback):
    """Tells whether training or evaluation runs."""

    def on_train_batch_begin(self, batch, logs=None):
        tell("steps")
        time.sleep(SECONDS)

    def on_test_batch_begin(self, batch, logs=None):
        tell("evaluation")
        time.sleep(SECONDS)


keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(120, 3)).astype("float32")
y = np.tanh(x).sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(120, seed=3).batch(10)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
histories = []
for epochs in (3, 2):
    history = model.fit(data, epochs=epochs, validation_data=(x[:50], y[:50]), verbose=0, callbacks=[Tell()]).history
    histories += [float(value) for name in sorted(history) for value in history[name]]
tell("end")
score = model.evaluate(x, y, verbose=0)
weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
if tfrep.is_chief():
    print("FOUND " + json.dumps({"weights": weights, "histories": histories, "score": list(map(float, score))}), flush=True)
tell("end")
time.sleep(0.2)
