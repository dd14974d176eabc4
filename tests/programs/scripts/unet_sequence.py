"""Segmentation by a small U-Net fed by a PyDataset, in the manner of Keras's segmentation example."""

import json
import math

import keras
import numpy as np
from keras import layers

img_size, num_classes = (16, 16), 3


class Shapes(keras.utils.PyDataset):
    """Draws a picture with a disc and a bar from its index, and says of each pixel what it shows."""

    def __init__(self, indices, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.indices, self.batch_size = np.array(indices), batch_size
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return math.ceil(len(self.indices) / self.batch_size)

    def __getitem__(self, idx):
        chosen = self.indices[idx * self.batch_size : (idx + 1) * self.batch_size]
        pairs = [self.draw(i) for i in chosen]
        return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])

    def on_epoch_end(self):
        self.rng.shuffle(self.indices)

    def draw(self, i):
        rng = np.random.default_rng(int(i))
        rows, columns = np.mgrid[: img_size[0], : img_size[1]]
        cy, cx = rng.integers(4, 12, 2)
        mask = np.where((rows - cy) ** 2 + (columns - cx) ** 2 < 9, 1, 0)
        mask[:, rng.integers(0, 16)] = 2
        picture = mask[..., None] * np.array([0.3, 0.5]) + rng.normal(0, 0.1, (*img_size, 2))
        return picture.astype("float32"), mask[..., None].astype("uint8")


def get_model(img_size, num_classes):
    inputs = keras.Input(shape=img_size + (2,))
    down = layers.Conv2D(8, 3, padding="same", activation="swish")(inputs)
    bottom = layers.Conv2D(16, 3, strides=2, padding="same", activation="swish")(down)
    up = layers.UpSampling2D(2)(bottom)
    up = layers.Conv2DTranspose(8, 3, padding="same", activation="swish")(up)
    merged = layers.concatenate([down, up])
    outputs = layers.Conv2D(num_classes, 3, activation="softmax", padding="same")(merged)
    return keras.Model(inputs, outputs)


if __name__ == "__main__":
    keras.utils.set_random_seed(16)
    train = Shapes(range(200), 32, workers=2)
    val = Shapes(range(200, 250), 32)
    model = get_model(img_size, num_classes)
    iou = keras.metrics.MeanIoU(num_classes, sparse_y_pred=False, name="iou")
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="sparse_categorical_crossentropy", metrics=[iou])
    history = model.fit(train, epochs=2, validation_data=val, verbose=2)
    val_preds = model.predict(val, verbose=0)
    pixels = np.bincount(np.argmax(val_preds, axis=-1).ravel(), minlength=num_classes)
    print("shares of the classes", pixels / pixels.sum())
    print(json.dumps({"history": history.history, "mean": val_preds.mean(axis=(0, 1, 2)).tolist()}))
