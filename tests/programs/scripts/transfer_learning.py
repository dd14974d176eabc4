"""A trained base that is frozen under a new head and then fine-tuned, in the manner of Keras's transfer learning guide."""

import json

import keras
import numpy as np
from keras import layers


def digits(classes):
    with np.load("digits.npz") as data:
        images, labels = data["images"][..., None].astype("float32") / 16, data["labels"]
    chosen = np.isin(labels, classes)
    return images[chosen], np.searchsorted(classes, labels[chosen])


def make_base():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="gelu", name="conv_1"),
            layers.Conv2D(16, 3, activation="gelu", name="conv_2"),
            layers.GlobalAveragePooling2D(),
        ],
        name="base",
    )


keras.utils.set_random_seed(21)
x, y = digits([0, 1, 2, 3, 4])
base_model = make_base()
pretrained = keras.Sequential([base_model, layers.Dense(5)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pretrained.compile(keras.optimizers.Adam(0.01), loss_fn)
pretrained.fit(x, y, batch_size=64, epochs=2, verbose=0)
base_model.save_weights("base.weights.h5")

# A new task on top of the frozen base.
base_model = make_base()
base_model.load_weights("base.weights.h5")
base_model.trainable = False
inputs = keras.Input((8, 8, 1))
outputs = layers.Dense(1)(base_model(inputs, training=False))
model = keras.Model(inputs, outputs)
model.summary(show_trainable=True)
x, y = digits([8, 9])
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["binary_accuracy"]
)
before = base_model.get_weights()
head = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history
assert all(np.array_equal(a, b) for a, b in zip(before, base_model.get_weights(), strict=True))

# Fine-tuning: all but the first layer, at a low rate.
base_model.trainable = True
base_model.get_layer("conv_1").trainable = False
model.compile(
    keras.optimizers.Adam(1e-3), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["binary_accuracy"]
)
tuned = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history
print("trainable weights:", len(model.trainable_weights))
print(json.dumps({"head": head, "tuned": tuned, "trainable": len(model.trainable_weights)}))
