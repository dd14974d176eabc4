"""A script that makes its own MirroredStrategy and uses fit, in the manner of TensorFlow's distributed training tutorial."""

import json
import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE = 128
tf.keras.utils.set_random_seed(55)
with np.load("digits.npz") as data:
    images, labels = data["images"][..., tf.newaxis], data["labels"]


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 16
    return image, label


train_dataset = tf.data.Dataset.from_tensor_slices((images[:1200], labels[:1200])).map(scale).cache().batch(BATCH_SIZE)
eval_dataset = tf.data.Dataset.from_tensor_slices((images[1200:], labels[1200:])).map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 3, activation="tanh", input_shape=(8, 8, 1)),
            tf.keras.layers.AveragePooling2D(2),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

history = model.fit(train_dataset, epochs=2, verbose=2).history
eval_loss, eval_acc = model.evaluate(eval_dataset)
path = "saved_model/"
model.export(path)
unreplicated = tf.saved_model.load(path)
served = unreplicated.serve(tf.cast(images[1200:1201], tf.float32) / 16)

model.save(os.path.join(path, "model.keras"))
with strategy.scope():
    replicated = tf.keras.models.load_model(os.path.join(path, "model.keras"))
    again = replicated.evaluate(eval_dataset, verbose=0)
print(
    json.dumps({"history": history, "eval": [eval_loss, eval_acc], "again": again, "served": served.numpy().tolist()})
)
