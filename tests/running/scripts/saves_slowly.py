"""Trains a layer that takes some seconds to save. If it takes any, rank 1 asks the launcher to end in the second epoch, twice.

Argument: the seconds. Rank 0 prints the epochs.
"""

import signal
import sys
import time

import keras
import numpy as np
import psutil

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.notices import is_asked_to_end

seconds = float(sys.argv[1])
epochs = []


class Slow(keras.layers.Dense):
    """Takes some seconds to save."""

    def save_own_variables(self, store):
        time.sleep(seconds)
        super().save_own_variables(store)


def begin(epoch, logs=None):
    epochs.append(epoch)


def begin_batch(batch, logs=None):
    if seconds and (epochs[-1], batch) == (1, 0) and tfrep.auto_strategy().rank:
        launcher = next(each for each in psutil.Process().parents() if "tfrep_strategy.cli" in each.cmdline())
        launcher.send_signal(signal.SIGTERM)
        while not is_asked_to_end():  # The launcher passes it on.
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)  # A second request changes nothing.


x = np.ones((8, 2))
model = keras.Sequential([keras.Input((2,)), Slow(1)])
model.compile("sgd", "mse")
watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_begin=begin_batch)
model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[watch])
if tfrep.is_chief():
    print("FOUND " + f'{{"epochs": {epochs}}}')
