"""Training that fails, is started again and goes on from its backup, in the manner of TensorFlow's fault tolerance guide."""

import json

import keras
import numpy as np

BACKUP_DIR = "backup"
keras.utils.set_random_seed(9)
rng = np.random.RandomState(9)
x = rng.rand(300, 12).astype("float32")
y = (x @ rng.rand(12, 1)).astype("float32")


class InterruptingCallback(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError(f"The machine was taken away in epoch {epoch}.")


def compiled_model():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(*more):
    model = compiled_model()
    callbacks = [keras.callbacks.BackupAndRestore(backup_dir=BACKUP_DIR), *more]
    history = model.fit(x, y, epochs=5, batch_size=50, callbacks=callbacks, verbose=0, shuffle=False)
    return model, history


try:
    train(InterruptingCallback(epoch=3))
except RuntimeError as e:
    print(f"Interrupted: {e}")
model, history = train()
assert history.epoch == [3, 4], history.epoch
print(json.dumps({"epochs": history.epoch, **history.history, "final": model.evaluate(x, y, verbose=0)}))
