"""One process of `benchmarks.own_loop`: the DCGAN of the tutorial, in a loop of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.crews import work

_BATCH, _NOISE = 256, 100


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Sets a process up.

    Args:
        settings: "communicator": through what processes train together; None if this one trains alone.

    Returns:
        A function that trains, and returns CPU seconds per step of this process; of 0 steps, those of the first call.
    """
    communicator = settings["communicator"]
    steps: dict[int, Callable[[tf.Tensor], Any]] = {}
    strategy: Any = None
    if communicator is not None:
        import tfrep_strategy as tfrep

        strategy = tfrep.MultiWorkerStrategy(communicator)
    images = tf.constant(np.random.default_rng(0).normal(size=(_BATCH, 28, 28, 1)).astype("float32"))

    def train(question: dict[str, Any]) -> float:
        smaller = question["smaller"]
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            if question["steps"] == 0:
                first = tf.function(_train_step(*_networks(smaller)))
                began = time.process_time()
                first(images)
                return time.process_time() - began
            if smaller not in steps:
                steps[smaller] = tf.function(_train_step(*_networks(smaller)))
                steps[smaller](images)
            began = time.process_time()
            for _ in range(question["steps"]):
                steps[smaller](images)
            return (time.process_time() - began) / question["steps"]

    return train


def _networks(smaller: int) -> tuple[Any, Any]:
    layers, first, second, third = keras.layers, 256 // smaller, 128 // smaller, 64 // smaller
    generator = keras.Sequential([keras.Input((_NOISE,)), layers.Dense(7 * 7 * first, use_bias=False)])
    generator.add(layers.BatchNormalization())
    generator.add(layers.LeakyReLU())
    generator.add(layers.Reshape((7, 7, first)))
    for filters, strides in ((second, 1), (third, 2)):
        generator.add(layers.Conv2DTranspose(filters, 5, strides=strides, padding="same", use_bias=False))
        generator.add(layers.BatchNormalization())
        generator.add(layers.LeakyReLU())
    generator.add(layers.Conv2DTranspose(1, 5, strides=2, padding="same", use_bias=False, activation="tanh"))
    discriminator = keras.Sequential([keras.Input((28, 28, 1))])
    for filters in (third, second):
        discriminator.add(layers.Conv2D(filters, 5, strides=2, padding="same"))
        discriminator.add(layers.LeakyReLU())
        discriminator.add(layers.Dropout(0.3))
    discriminator.add(layers.Flatten())
    discriminator.add(layers.Dense(1))
    return generator, discriminator


def _train_step(generator: Any, discriminator: Any) -> Callable[[tf.Tensor], Any]:
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    of_generator, of_discriminator = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)
    of_generator.build(generator.trainable_variables)
    of_discriminator.build(discriminator.trainable_variables)

    def step(images: tf.Tensor) -> Any:
        noise = tf.random.normal([_BATCH, _NOISE])
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = generator(noise, training=True)
            of_real, of_fake = discriminator(images, training=True), discriminator(made, training=True)
            deceived = cross_entropy(tf.ones_like(of_fake), of_fake)
            told = cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_fake), of_fake)
        of_generator.apply(first.gradient(deceived, generator.trainable_variables), generator.trainable_variables)
        of_discriminator.apply(second.gradient(told, discriminator.trainable_variables), discriminator.trainable_variables)
        return deceived, told

    return step


if __name__ == "__main__":
    main()
