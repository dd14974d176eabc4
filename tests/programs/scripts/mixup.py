"""Pairs of pictures mixed in the input pipeline, in the manner of Keras's MixUp example."""

import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers

AUTO = tf.data.AUTOTUNE
BATCH_SIZE = 64
keras.utils.set_random_seed(8)


def sample_beta_distribution(size, concentration_0=0.2, concentration_1=0.2):
    gamma_1_sample = tf.random.gamma(shape=[size], alpha=concentration_1)
    gamma_2_sample = tf.random.gamma(shape=[size], alpha=concentration_0)
    return gamma_1_sample / (gamma_1_sample + gamma_2_sample + 1e-7)


def mix_up(ds_one, ds_two, alpha=0.2):
    images_one, labels_one = ds_one
    images_two, labels_two = ds_two
    batch_size = keras.ops.shape(images_one)[0]
    mix = sample_beta_distribution(batch_size, alpha, alpha)
    x_l = keras.ops.reshape(mix, (batch_size, 1, 1, 1))
    y_l = keras.ops.reshape(mix, (batch_size, 1))
    images = images_one * x_l + images_two * (1 - x_l)
    labels = labels_one * y_l + labels_two * (1 - y_l)
    return images, labels


data = np.load("digits.npz")
images = data["images"][..., None].astype("float32") / 16
labels = tf.one_hot(data["labels"], 10)
train = (images[:1024], labels[:1024])
train_ds_one = tf.data.Dataset.from_tensor_slices(train).shuffle(BATCH_SIZE * 10).batch(BATCH_SIZE)
train_ds_two = tf.data.Dataset.from_tensor_slices(train).shuffle(BATCH_SIZE * 10).batch(BATCH_SIZE)
train_ds = tf.data.Dataset.zip((train_ds_one, train_ds_two))
val_ds = tf.data.Dataset.from_tensor_slices((images[1024:], labels[1024:])).batch(BATCH_SIZE)
train_ds_mu = train_ds.map(lambda one, two: mix_up(one, two, alpha=0.2), num_parallel_calls=AUTO).prefetch(AUTO)

model = keras.Sequential(
    [
        layers.Input(shape=(8, 8, 1)),
        layers.Conv2D(16, (3, 3), activation="relu"),
        layers.SpatialDropout2D(0.2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
history = model.fit(train_ds_mu, validation_data=val_ds, epochs=2, verbose=2)
_, test_acc = model.evaluate(val_ds)
print(f"Test accuracy: {test_acc * 100:.2f}%")
print(json.dumps({**history.history, "test": test_acc}))
