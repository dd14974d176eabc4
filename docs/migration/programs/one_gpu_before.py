"""Trains on one GPU, or on the CPU where there is none."""

import json

import keras

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
model.compile(
    keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=64, epochs=2, verbose=2).history

loss, accuracy = model.evaluate(*test, verbose=0)
results = {"losses": history["loss"], "test_loss": loss}
print(json.dumps(results | {"test_accuracy": accuracy}))
