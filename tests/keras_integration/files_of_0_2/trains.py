"""Trains a small net for four epochs. With FAILS=1 it fails after the second one, and leaves what a run leaves that was killed."""

import os
import time

import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.linspace(-1, 1, 96, dtype="float32").reshape(24, 4)
y = np.stack([x.sum(1), x[:, 0] * x[:, 1]], axis=1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
model.compile("adam", "mse")


class Fails(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and os.environ.get("FAILS"):
            time.sleep(4)
            os._exit(3)


callbacks = [Fails()]
if "BACKUP" in os.environ:
    callbacks.insert(0, keras.callbacks.BackupAndRestore(os.environ["BACKUP"], delete_checkpoint=False))
history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks).history
print("LOSSES", *map(float, history["loss"]))
if "MODEL" in os.environ:
    model.save(os.environ["MODEL"])
