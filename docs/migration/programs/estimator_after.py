"""Trains on one device, or on two: `tfrep run -n 2 estimator_after.py`."""

import json

import keras
import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits

(x, y), test = load_digits()
keras.utils.set_random_seed(1)


def input_fn():
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(1437, seed=1).repeat().batch(64)


def eval_input_fn():
    data = tf.data.Dataset.from_tensor_slices((test.images, test.labels))
    return data.batch(64)


def make_model(learning_rate):
    images = keras.Input((8, 8, 1), name="images")
    hidden = keras.layers.Dense(32, "tanh")(keras.layers.Flatten()(images))
    logits = keras.layers.Dense(10, name="logits")(hidden)
    model = keras.Model(images, logits)
    model.compile(
        keras.optimizers.SGD(learning_rate, momentum=0.9, global_clipnorm=0.3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


model = make_model(learning_rate=0.2)
history = model.fit(
    input_fn(),
    steps_per_epoch=23,
    epochs=2,
    validation_data=eval_input_fn(),
    callbacks=[
        keras.callbacks.BackupAndRestore("digits/backup"),
        keras.callbacks.TensorBoard("digits/logs"),
    ],
    verbose=2,
).history
model.export("digits/export", verbose=False)
results = {"losses": history["loss"], "test_losses": history["val_loss"]}
print(json.dumps(results | {"accuracy": history["val_accuracy"]}))
