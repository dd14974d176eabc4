"""Trains on one device, or on two ranks: `tfrep run -n 2 horovod_after.py`."""

import json

import keras

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

(x, y), test = load_digits()
keras.utils.set_random_seed(1)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, "tanh"),
        keras.layers.Dense(10),
    ]
)
learning_rate = tfrep.callbacks.scale_learning_rate(0.1, replicas=2)
model.compile(
    keras.optimizers.SGD(learning_rate, momentum=0.9, global_clipnorm=0.3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    tfrep.callbacks.LearningRateWarmup(learning_rate, epochs=1, replicas=2),
    keras.callbacks.ModelCheckpoint("model.keras"),
]
history = model.fit(
    x,
    y,
    batch_size=2 * 32,
    epochs=2,
    callbacks=callbacks,
    verbose=2,
).history

loss, accuracy = model.evaluate(*test, verbose=0)
results = {"losses": history["loss"], "test_loss": loss}
print(json.dumps(results | {"test_accuracy": accuracy}))
