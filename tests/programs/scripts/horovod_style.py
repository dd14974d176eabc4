"""A script that names its strategy and cares for its rank, as people who come from Horovod write it."""

import json

import keras
import numpy as np

import tfrep_strategy as tfrep

strategy = tfrep.MultiWorkerStrategy()
is_first, size = tfrep.is_chief(), strategy.num_replicas_in_sync
print(f"one of {size}")

keras.utils.set_random_seed(100)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64).astype("float32") / 16, data["labels"]

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.001),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.001 * min(1.0, (epoch + 1) / 2))]
if is_first:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
history = model.fit(
    x[:1000], y[:1000], batch_size=100, epochs=2, callbacks=callbacks, verbose=1 if is_first else 0
).history
score = model.evaluate(x[1000:], y[1000:], verbose=0)
everyone = tfrep.all_gather_object({"is_first": is_first, "loss": round(score[0], 6)})
assert len({each["loss"] for each in everyone}) == 1
print(json.dumps({"history": history, "score": score}))
