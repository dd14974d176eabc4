"""Trains a Keras model through tf.estimator, as articles of 2018 do."""

import time

import numpy as np
import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits

(train_images, train_labels), (test_images, test_labels) = load_digits()
BATCH_SIZE, EPOCHS = 32, 2


def input_fn(images, labels, epochs, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(5000).repeat(epochs).batch(batch_size)
    return dataset.prefetch(1)


class TimeHistory(tf.train.SessionRunHook):
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
    optimizer=tf.train.AdamOptimizer(learning_rate=0.003),
    metrics=["accuracy"],
)

strategy = tf.contrib.distribute.MirroredStrategy(num_gpus=2)
config = tf.estimator.RunConfig(
    model_dir="digits",
    train_distribute=strategy,
    eval_distribute=strategy,
)
estimator = tf.keras.estimator.model_to_estimator(model, config=config)

time_hist = TimeHistory()
estimator.train(
    lambda: input_fn(train_images, train_labels, EPOCHS, BATCH_SIZE),
    hooks=[time_hist],
)
results = estimator.evaluate(
    lambda: input_fn(test_images, test_labels, 1, BATCH_SIZE),
)
speed = BATCH_SIZE * strategy.num_replicas_in_sync / np.mean(time_hist.times)
print(f"{speed:.0f} images a second")
print(results)
