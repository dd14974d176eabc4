"""A Wasserstein GAN with gradient penalty and several critic steps per batch, in the manner of Keras's WGAN-GP example."""

import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers

noise_dim = 8


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, discriminator_extra_steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = discriminator_extra_steps, gp_weight

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, batch_size, real, fake):
        alpha = tf.random.uniform([batch_size, 1], 0.0, 1.0)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=1) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        if isinstance(real, tuple):
            real = real[0]
        batch_size = tf.shape(real)[0]
        for _ in range(self.d_steps):
            latent = tf.random.normal(shape=(batch_size, noise_dim))
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real, training=True)
                d_cost = tf.reduce_mean(fake_logits) - tf.reduce_mean(real_logits)
                d_loss = d_cost + self.gp_weight * self.gradient_penalty(batch_size, real, fake)
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables, strict=True))
        latent = tf.random.normal(shape=(batch_size, noise_dim))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(latent, training=True), training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
angle = rng.uniform(0, 2 * np.pi, 1000)
ring = np.stack([np.cos(angle), np.sin(angle)], 1).astype("float32") + rng.normal(0, 0.05, (1000, 2)).astype("float32")

critic = keras.Sequential([keras.Input((2,)), layers.Dense(32, "tanh"), layers.Dense(32, "tanh"), layers.Dense(1)])
generator = keras.Sequential([keras.Input((noise_dim,)), layers.Dense(32, "relu"), layers.Dense(2)])
wgan = WGAN(critic, generator)
wgan.compile(
    d_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
    g_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
)
history = wgan.fit(ring, batch_size=100, epochs=3, verbose=2).history
points = generator(np.random.default_rng(1).normal(size=(500, noise_dim)).astype("float32")).numpy()
print("radius of what is generated:", np.linalg.norm(points, axis=1).mean())
print(json.dumps({**history, "radius": float(np.linalg.norm(points, axis=1).mean())}))
