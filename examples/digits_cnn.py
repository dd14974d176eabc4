"""A small convolutional network learns digits with Keras's `fit`.

    python examples/digits_cnn.py
    tfrep run -n 2 examples/digits_cnn.py

Both print the same losses, up to rounding, and a test accuracy of about 0.93. The
digits come with tfrep_strategy. Half a minute on two cores.
"""

from __future__ import annotations

import argparse
import json

import keras
from keras import layers

from tfrep_strategy.contrib.digits import load_digits


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A convolutional network on digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save", default="digits.keras")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    train, test = load_digits()
    model = build_model()
    model.summary()
    model.compile(
        keras.optimizers.Adam(args.learning_rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        train.images,
        train.labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_split=0.1,
        verbose=2,
    )
    loss, accuracy = model.evaluate(test.images, test.labels, verbose=0)
    model.save(args.save)
    print(f"Test accuracy: {accuracy:.3f}")
    print(json.dumps({"history": history.history, "test_loss": loss, "test_accuracy": accuracy}))


if __name__ == "__main__":
    main()
