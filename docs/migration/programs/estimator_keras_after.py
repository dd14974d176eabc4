"""Trains on two replicas of this process, or on two ranks."""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

(train_images, train_labels), (test_images, test_labels) = load_digits()
BATCH_SIZE, EPOCHS = 32, 2
tfrep.use_logical_cpus(2)  # For two replicas without GPUs.
keras.utils.set_random_seed(1)


def input_fn(images, labels, epochs, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(5000).repeat(epochs).batch(batch_size)
    return dataset.prefetch(1)


class TimeHistory(tfrep.estimator.SessionRunHook):
    def begin(self):
        self.times = []

    def before_run(self, run_context):
        self.iter_time_start = time.time()

    def after_run(self, run_context, run_values):
        self.times.append(time.time() - self.iter_time_start)


inputs = tf.keras.Input(shape=(8, 8, 1))
x = tf.keras.layers.Conv2D(8, kernel_size=(3, 3), activation="relu")(inputs)
x = tf.keras.layers.MaxPooling2D(pool_size=(2, 2), strides=2)(x)
x = tf.keras.layers.Flatten()(x)
predictions = tf.keras.layers.Dense(10, activation="softmax")(x)
model = tf.keras.Model(inputs=inputs, outputs=predictions)
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=keras.optimizers.Adam(learning_rate=0.003),
    metrics=["accuracy"],
)

strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
config = tfrep.estimator.RunConfig(
    model_dir="digits",
    train_distribute=strategy,
    eval_distribute=strategy,
)
estimator = tfrep.estimator.model_to_estimator(model, config=config)

time_hist = TimeHistory()
estimator.train(
    lambda: input_fn(train_images, train_labels, EPOCHS, BATCH_SIZE),
    hooks=[time_hist],
)
results = estimator.evaluate(
    lambda: input_fn(test_images, test_labels, 1, BATCH_SIZE),
)
speed = BATCH_SIZE * strategy.num_replicas_in_sync / np.mean(time_hist.times)
print(f"{speed:.0f} images a second", file=sys.stderr)
shown = {"losses": [results["loss"]], "accuracy": results["accuracy"]}
print(json.dumps(shown | {"steps": len(time_hist.times)}))
