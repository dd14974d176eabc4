"""A GAN in a custom training loop, as TensorFlow's tutorials write it.

    python examples/gan_loop.py
    tfrep run -n 2 examples/gan_loop.py

Replicas share the work of `train_step`, because it is a `tf.function` that trains. The
noise is one device's, too, so both commands print the same losses, up to rounding. The
digits come with tfrep_strategy. It writes `digits.png` and a checkpoint, from which the
next start continues. One minute on two cores. It needs Pillow.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfrep_strategy.contrib.digits import load_digits

BATCH_SIZE = 64
NOISE = 32


def build_generator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(4 * 4 * 32, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((4, 4, 32)),
            layers.Conv2DTranspose(16, 5, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


def build_discriminator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 5, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def save_pictures(path: str, images: Any) -> None:
    """Writes 64 digits, eight in a row, with a margin around each and pixels as large squares."""
    digits = np.pad(np.reshape(images, (8, 8, 8, 8)), ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = digits.transpose(0, 2, 1, 3).reshape(80, 80, 1)
    keras.utils.save_img(path, np.kron(rows, np.ones((6, 6, 1))))


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN on digits.")
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    digits = load_digits()[0].images
    data = tf.data.Dataset.from_tensor_slices(digits).shuffle(len(digits)).batch(BATCH_SIZE)

    generator, discriminator = build_generator(), build_discriminator()
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    checkpoint = tf.train.Checkpoint(
        generator=generator,
        discriminator=discriminator,
        generator_optimizer=generator_optimizer,
        discriminator_optimizer=discriminator_optimizer,
    )
    manager = tf.train.CheckpointManager(checkpoint, "gan", max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noise = tf.random.normal([BATCH_SIZE, NOISE])
        with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
            fake = discriminator(generator(noise, training=True), training=True)
            real = discriminator(images, training=True)
            generator_loss = cross_entropy(tf.ones_like(fake), fake)
            discriminator_loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(
                tf.zeros_like(fake), fake
            )
        for model, optimizer, tape, loss in (
            (generator, generator_optimizer, generator_tape, generator_loss),
            (discriminator, discriminator_optimizer, discriminator_tape, discriminator_loss),
        ):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return generator_loss, discriminator_loss

    losses = []
    for epoch in range(args.epochs):
        began = time.monotonic()
        for images in data:
            generator_loss, discriminator_loss = train_step(images)
        losses.append([float(generator_loss), float(discriminator_loss)])
        print(f"Epoch {epoch + 1}: {losses[-1]}, {time.monotonic() - began:.1f} s")
        manager.save()
    save_pictures("digits.png", generator(tf.random.normal([64, NOISE], seed=1), training=False))
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
