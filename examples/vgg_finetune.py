"""VGG16, trained on ImageNet, learns another task: first a new head, then the last block.

    python examples/vgg_finetune.py
    tfrep run -n 2 examples/vgg_finetune.py

The pictures are digits that come with tfrep_strategy. It prints the losses of both
phases and the test accuracy. Keras downloads the weights once (58 MB);
`--weights none` starts from random ones. Three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json

import keras
import numpy as np
from keras import layers

from tfrep_strategy.contrib.digits import Examples, load_digits


def as_pictures(examples: Examples, count: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the digits as VGG16 wants them: 32 by 32 pixels of three colours."""
    images = np.kron(examples.images[:count], np.ones((1, 4, 4, 3), "float32"))
    return keras.applications.vgg16.preprocess_input(images * 255), examples.labels[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune VGG16.")
    parser.add_argument("--weights", default="imagenet", choices=["imagenet", "none"])
    parser.add_argument("--epochs", type=int, default=2, help="of each phase")
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas")
    parser.add_argument("--examples", type=int, help="train on so many; default: all")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    train, test = load_digits()
    x, y = as_pictures(train, args.examples)
    x_test, y_test = as_pictures(test, args.examples)

    base = keras.applications.VGG16(
        weights=None if args.weights == "none" else args.weights,
        include_top=False,
        input_shape=(32, 32, 3),
        pooling="avg",
    )
    inputs = keras.Input((32, 32, 3))
    features = layers.Dropout(0.2)(base(inputs, training=False))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(features))

    # The base keeps its weights while the head learns to use them.
    base.trainable = False
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    head = model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, verbose=2)

    # Then the last block of the base learns, slowly. `compile` notes what is trainable.
    base.trainable = True
    for layer in base.layers:
        layer.trainable = layer.name.startswith("block5")
    model.compile(
        keras.optimizers.Adam(1e-5), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    tuned = model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, verbose=2)

    loss, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)
    model.save("finetuned.keras")
    print(f"Test accuracy: {accuracy:.3f}")
    print(
        json.dumps(
            {"head": head.history["loss"], "tuned": tuned.history["loss"], "test_loss": loss}
        )
    )


if __name__ == "__main__":
    main()
