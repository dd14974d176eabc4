"""A script with a switch between OneDeviceStrategy and MirroredStrategy, in the manner of the TensorFlow model garden."""

import argparse
import json

import numpy as np
import tensorflow as tf


def get_distribution_strategy(name):
    if name == "off":
        return tf.distribute.get_strategy()
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("device:CPU:0")
    if name == "mirrored":
        return tf.distribute.MirroredStrategy()
    raise ValueError(f"Unknown distribution strategy: {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--distribution_strategy", default="one_device")
    flags = parser.parse_args()
    strategy = get_distribution_strategy(flags.distribution_strategy)
    tf.keras.utils.set_random_seed(3)
    with np.load("digits.npz") as data:
        x, y = data["images"].reshape(-1, 64).astype(np.float32) / 16, data["labels"]
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10, activation="softmax")])
        model.compile("ftrl", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=99, epochs=2, verbose=2)
    total = strategy.reduce(tf.distribute.ReduceOp.MEAN, tf.constant(float(len(x))), axis=None)
    print(json.dumps({"history": history.history, "examples": float(total)}))


if __name__ == "__main__":
    main()
