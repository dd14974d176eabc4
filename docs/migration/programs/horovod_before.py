"""Trains with Horovod: `horovodrun -np 2 python horovod_before.py`."""

import json

import horovod.tensorflow.keras as hvd
import keras
import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

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
learning_rate = 0.1 * hvd.size()
optimizer = keras.optimizers.SGD(
    learning_rate,
    momentum=0.9,
    global_clipnorm=0.3,
)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(
    optimizer,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(learning_rate, warmup_epochs=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=2,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
).history

loss, accuracy = model.evaluate(*test, verbose=0)
results = {"losses": history["loss"], "test_loss": loss}
print(json.dumps(results | {"test_accuracy": accuracy}))
