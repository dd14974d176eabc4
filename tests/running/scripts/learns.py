"""Trains for so many epochs of eight steps, or until so many seconds are over, and says what it has learnt.

The third argument slows it down: "input" each batch, "rank1" each step of rank 1. Or it is "fails", in the second epoch.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

epochs, seconds, how = int(sys.argv[1]), float(sys.argv[2]), "".join(sys.argv[3:])
rng = np.random.RandomState(0)
x, y = rng.rand(64, 20).astype("float32"), rng.rand(64, 1).astype("float32")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
began = time.monotonic()


def look(epoch, logs):
    print("EPOCH", epoch, flush=True)
    if how == "fails" and epoch == 1:
        raise ValueError("This was to be.")
    if seconds and time.monotonic() - began > seconds:
        model.stop_training = True


def slow_down(batch, logs):
    if how == "rank1" and getattr(model.distribute_strategy, "rank", 0) == 1:
        time.sleep(0.05)


def batches():
    for i in range(0, 64, 8):
        time.sleep(0.05)
        yield x[i : i + 8], y[i : i + 8]


callback = keras.callbacks.LambdaCallback(on_epoch_end=look, on_train_batch_begin=slow_down)
callback.supports_remote_logs = True
if how == "input":
    spec = (tf.TensorSpec([8, 20]), tf.TensorSpec([8, 1]))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec).repeat()
    history = model.fit(data, steps_per_epoch=8, epochs=epochs, verbose=0, callbacks=[callback])
else:
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[callback])
print("FOUND " + json.dumps({"losses": history.history["loss"], "weights": [w.tolist() for w in model.get_weights()]}))
