"""A variational autoencoder that samples in a layer, in the manner of Keras's VAE example and subclassing guide."""

import json
import os

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers, ops

latent_dim = 2


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a digit."""

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(shape=ops.shape(z_mean))
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        for name, value in zip(self.trackers, (total_loss, reconstruction_loss, kl_loss), strict=True):
            self.trackers[name].update_state(value)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


encoder_inputs = keras.Input(shape=(8, 8, 1))
x = layers.Conv2D(16, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
z_mean, z_log_var = layers.Dense(latent_dim, name="z_mean")(x), layers.Dense(latent_dim, name="z_log_var")(x)
encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])], name="encoder")

latent_inputs = keras.Input(shape=(latent_dim,))
x = layers.Reshape((4, 4, 8))(layers.Dense(4 * 4 * 8, activation="relu")(latent_inputs))
decoder_outputs = layers.Conv2DTranspose(1, 3, activation="sigmoid", strides=2, padding="same")(x)
decoder = keras.Model(latent_inputs, decoder_outputs, name="decoder")

digits = np.load("digits.npz")["images"][..., np.newaxis].astype("float32") / 16
vae = VAE(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam(0.01))
history = vae.fit(digits, epochs=3, batch_size=128, verbose=2).history

n = 5
grid = np.array([[x, y] for y in np.linspace(1, -1, n) for x in np.linspace(-1, 1, n)])
figure = vae.decoder.predict(grid, verbose=0).reshape(n, n, 8, 8).transpose(0, 2, 1, 3).reshape(n * 8, n * 8)
os.makedirs("plots", exist_ok=True)
plt.imsave("plots/latent_space.png", figure, cmap="gray")
print(json.dumps({"loss": history["loss"], "mean": float(figure.mean())}))
