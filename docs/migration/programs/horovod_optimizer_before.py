"""Trains with Horovod's optimizer alone, under `horovodrun -np 2`."""

import json

import horovod.tensorflow.keras as hvd
import keras

from tfrep_strategy.contrib.digits import load_digits

hvd.init()
(x, y), test = load_digits()
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
keras.utils.set_random_seed(1)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, "tanh"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.3)
model.compile(
    hvd.DistributedOptimizer(optimizer),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history

loss, accuracy = model.evaluate(*test, verbose=0)
results = {"losses": history["loss"], "test_loss": loss}
print(json.dumps(results | {"test_accuracy": accuracy}))
