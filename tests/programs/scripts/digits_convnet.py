"""A small convolutional network on digits with command-line options, in the manner of Keras's first vision example."""

import argparse
import json

import keras
import numpy as np
from keras import layers


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="model.keras")
    return parser.parse_args()


def load_data():
    with np.load("digits.npz") as data:
        x = np.expand_dims(data["images"].astype("float32") / 16, -1)
        y = keras.utils.to_categorical(data["labels"], 10)
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


def build_model(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(shape=input_shape),
            layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(32, kernel_size=(2, 2), activation="relu"),
            layers.Flatten(),
            layers.Dense(num_classes, activation="softmax"),
        ]
    )


def main():
    args = parse_args()
    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_data()
    print(x_train.shape[0], "train samples,", x_test.shape[0], "test samples")
    model = build_model(x_train.shape[1:], y_train.shape[-1])
    model.summary()
    model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.Adam(args.lr), metrics=["accuracy"])
    history = model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_split=0.1)
    score = model.evaluate(x_test, y_test, verbose=0)
    model.save(args.save)
    print("Test loss:", score[0])
    print("Test accuracy:", score[1])
    print(json.dumps({"history": history.history, "score": score}))


if __name__ == "__main__":
    main()
