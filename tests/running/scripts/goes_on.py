"""Calls fit twice, and sends signals where it is told to. Rank 0 prints what it has learned.

Arguments: who gets the signal ("self", "launcher", or how the name of a process above begins), its number, and for each start a
list: the rank that sends it, the fit, the epoch and the batch before which it does; "end" for the end of the epoch.
"""

import json
import os
import sys

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfrep_strategy as tfrep

keras.utils.set_random_seed(0)
to, number, places = json.loads(sys.argv[1]) if len(sys.argv) > 1 else ("self", 0, [])
rank = getattr(tfrep.auto_strategy(), "rank", 0) if places else 0
place = [*places, *[None] * 9][int(os.environ.get("TFREP_RESTARTS", 0))]
x = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(50, seed=3).batch(8)
hidden = [keras.layers.Dense(8, use_bias=False), keras.layers.BatchNormalization(synchronized=True)]
model = keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])


def receiver():
    """Returns the process that gets the signal."""
    if to == "self":
        return os.getpid()
    if to == "launcher":
        return next(each.pid for each in psutil.Process().parents() if "tfrep_strategy.cli" in each.cmdline())
    return next(each.pid for each in psutil.Process().parents() if each.name().startswith(to))


class Watch(keras.callbacks.Callback):
    """Remembers epochs and batches."""

    def __init__(self, fit):
        super().__init__()
        self.fit, self.epochs, self.batches = fit, [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        self.signal_at(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.signal_at("end")

    def signal_at(self, batch):
        if [rank, self.fit, self.epochs[-1], batch] == place:
            os.kill(receiver(), number)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1


found = []
for fit in range(2):
    watch = Watch(fit)
    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    slow_down = keras.callbacks.ReduceLROnPlateau("mae", factor=0.5, patience=1)
    history = model.fit(data, epochs=4, verbose=0, callbacks=[watch, stop, slow_down])
    weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
    found.append([watch.epochs, [watch.batches], weights, *[list(map(float, history.history[k])) for k in sorted(history.history)]])
if tfrep.is_chief():
    print("FOUND " + json.dumps({"fits": found}))
