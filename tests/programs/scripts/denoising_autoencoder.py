"""A convolutional autoencoder, first to copy and then to denoise, in the manner of Keras's autoencoder example."""

import json
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import layers

FIGURES = Path("figures")


def noise(array, rng):
    noisy = array + 0.4 * rng.normal(loc=0.0, scale=1.0, size=array.shape)
    return np.clip(noisy, 0.0, 1.0).astype("float32")


def display(array1, array2, name):
    n = 6
    plt.figure(figsize=(6, 2))
    for i, (image1, image2) in enumerate(zip(array1[:n], array2[:n], strict=True)):
        for row, image in enumerate((image1, image2)):
            axes = plt.subplot(2, n, i + 1 + row * n)
            axes.imshow(image.reshape(8, 8), cmap="gray")
            axes.get_xaxis().set_visible(False)
            axes.get_yaxis().set_visible(False)
    plt.savefig(FIGURES / name)
    plt.close()


def build():
    image = layers.Input(shape=(8, 8, 1))
    x = layers.Conv2D(16, (3, 3), activation="relu", padding="same")(image)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    x = layers.Conv2DTranspose(16, (3, 3), strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)
    autoencoder = keras.Model(image, x)
    autoencoder.compile(optimizer="adam", loss="binary_crossentropy")
    return autoencoder


if __name__ == "__main__":
    keras.utils.set_random_seed(11)
    FIGURES.mkdir(exist_ok=True)
    images = np.load("digits.npz")["images"].astype("float32").reshape(-1, 8, 8, 1) / 16
    train, test = images[:1200], images[1200:]
    rng = np.random.default_rng(11)
    noisy_train, noisy_test = noise(train, rng), noise(test, rng)

    autoencoder = build()
    first = autoencoder.fit(train, train, epochs=1, batch_size=128, shuffle=True, validation_data=(test, test))
    display(test, autoencoder.predict(test), "copied.png")
    second = autoencoder.fit(noisy_train, train, epochs=2, batch_size=128, validation_data=(noisy_test, test))
    predictions = autoencoder.predict(noisy_test)
    display(noisy_test, predictions, "denoised.png")
    error = float(np.mean((predictions - test) ** 2))
    print(json.dumps({"first": first.history, "second": second.history, "error": error}))
