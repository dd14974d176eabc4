"""A residual network learns from JPEG files, a folder for each class.

    python examples/resnet_jpegs.py
    tfrep run -n 2 examples/resnet_jpegs.py
    tfrep run -n 4 examples/resnet_jpegs.py --images my_pictures --size 160 --epochs 20

Without `--images` it draws 480 pictures of three shapes. It prints the losses of each
epoch and the class of one picture. Each process decodes only its own pictures of a
batch. One minute on two cores. It needs Pillow.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from PIL import Image, ImageDraw

SHAPES = ("cross", "disc", "square")


def draw_pictures(folder: Path, per_class: int, size: int = 48) -> None:
    """Draws shapes at random places on noise, a folder for each shape."""
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for i in range(per_class):
            noise = rng.integers(0, 90, (size, size, 3), dtype=np.uint8)
            picture = Image.fromarray(noise)
            pen = ImageDraw.Draw(picture)
            x, y = rng.integers(0, size // 2, 2).tolist()
            box = (x, y, x + size // 2, y + size // 2)
            if shape == "cross":
                pen.line(box, fill="white", width=5)
                pen.line((box[0], box[3], box[2], box[1]), fill="white", width=5)
            elif shape == "disc":
                pen.ellipse(box, fill="white")
            else:
                pen.rectangle(box, fill="white")
            picture.save(folder / shape / f"{i:03d}.jpg", quality=90)


def residual_block(x: Any, filters: int, strides: int) -> Any:
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = layers.Conv2D(filters, 1, strides, use_bias=False)(x)
        shortcut = layers.BatchNormalization(momentum=0.9)(shortcut)
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("relu")(x)
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.Activation("relu")(layers.add([x, shortcut]))


def build_resnet(size: int, classes: int, widths: list[int]) -> keras.Model:
    inputs = keras.Input((size, size, 3))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomTranslation(0.1, 0.1)(x)
    x = layers.Rescaling(1 / 255)(x)
    x = layers.Conv2D(widths[0], 3, strides=2, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("relu")(x)
    for i, filters in enumerate(widths):
        x = residual_block(x, filters, strides=1 if i == 0 else 2)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def train(folder: Path, args: argparse.Namespace) -> None:
    training, validation = keras.utils.image_dataset_from_directory(
        folder,
        validation_split=0.2,
        subset="both",
        seed=1,
        image_size=(args.size, args.size),
        batch_size=args.batch_size,
    )
    names = training.class_names
    model = build_resnet(args.size, len(names), args.widths)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        training.prefetch(2),
        epochs=args.epochs,
        validation_data=validation.prefetch(2),
        callbacks=[keras.callbacks.ModelCheckpoint("resnet_{epoch}.keras")],
        verbose=2,
    )

    picture = sorted(folder.rglob("*.jpg"))[0]
    pixels = keras.utils.img_to_array(
        keras.utils.load_img(picture, target_size=(args.size, args.size))
    )
    probabilities = keras.ops.softmax(model.predict(pixels[None], verbose=0)[0])
    best = int(keras.ops.argmax(probabilities))
    probability = float(probabilities[best])
    print(f"{picture.parent.name}/{picture.name} is a {names[best]}: {probability:.2f}")
    print(json.dumps({"history": history.history, "probability": probability}))


def main() -> None:
    parser = argparse.ArgumentParser(description="A residual network on JPEG files.")
    parser.add_argument("--images", type=Path, help="has a folder for each class")
    parser.add_argument("--size", type=int, default=48, help="of pictures, in pixels")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--per-class", type=int, default=160, help="pictures to draw")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    if args.images:
        train(args.images, args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            draw_pictures(Path(folder), args.per_class)
            train(Path(folder), args)


if __name__ == "__main__":
    main()
