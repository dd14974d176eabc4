"""Pictures in a folder per class, with augmentation in the model, in the manner of Keras's "image classification from scratch"."""

import json
import os
import tempfile

import keras
import numpy as np
from keras import layers
from PIL import Image

image_size, batch_size = (24, 24), 16


def draw_pictures(root, per_class=40):
    rng = np.random.default_rng(3)
    for label in ("cross", "square"):
        os.makedirs(f"{root}/{label}", exist_ok=True)
        for i in range(per_class):
            picture = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            a = rng.integers(4, 12)
            if label == "cross":
                picture[a + 6 : a + 10, a : a + 16] = picture[a : a + 16, a + 6 : a + 10] = 220
            else:
                picture[a : a + 14, a : a + 14] = 220
            Image.fromarray(picture).save(f"{root}/{label}/{i}.png")


def make_model(input_shape):
    inputs = keras.Input(shape=input_shape)
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomRotation(0.05)(x)
    x = layers.Rescaling(1.0 / 255)(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous = x
    x = layers.SeparableConv2D(16, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.add([x, layers.Conv2D(16, 1, padding="same")(previous)])
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.25)(x)
    return keras.Model(inputs, layers.Dense(1, activation=None)(x))


pictures = tempfile.TemporaryDirectory()
draw_pictures(pictures.name)
train_ds, val_ds = keras.utils.image_dataset_from_directory(
    pictures.name, validation_split=0.25, subset="both", seed=1337, image_size=image_size, batch_size=batch_size
)
train_ds, val_ds = train_ds.prefetch(2), val_ds.prefetch(2)
model = make_model(input_shape=image_size + (3,))
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(name="acc")],
)
callbacks = [keras.callbacks.ModelCheckpoint("save_at_{epoch}.keras")]
history = model.fit(train_ds, epochs=2, callbacks=callbacks, validation_data=val_ds, verbose=2).history

img = keras.utils.load_img(f"{pictures.name}/cross/7.png", target_size=image_size)
img_array = keras.ops.expand_dims(keras.utils.img_to_array(img), 0)
score = float(keras.ops.sigmoid(model.predict(img_array)[0][0]))
print(f"This image is {100 * (1 - score):.2f}% cross and {100 * score:.2f}% square.")
print(json.dumps({**history, "score": score}))
