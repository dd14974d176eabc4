"""Trains on two devices with TensorFlow's own strategy."""

import json

import keras
import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits

(x, y), test = load_digits()
keras.utils.set_random_seed(1)

# Two logical CPUs stand for two GPUs.
cpu = tf.config.list_physical_devices("CPU")[0]
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, halves)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

with strategy.scope():
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
