"""Patches of pictures through Transformer blocks, in the manner of Keras's ViT example."""

import json

import keras
import numpy as np
from keras import layers, ops

patch_size, num_patches, projection_dim, num_heads = 2, 16, 16, 2


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        input_shape = ops.shape(images)
        batch_size, height, width, channels = input_shape
        patches = keras.ops.image.extract_patches(images, size=self.patch_size)
        count = (height // self.patch_size) * (width // self.patch_size)
        return ops.reshape(patches, (batch_size, count, self.patch_size * self.patch_size * channels))


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


def create_vit_classifier():
    inputs = keras.Input(shape=(8, 8, 1))
    encoded = PatchEncoder(num_patches, projection_dim)(Patches(patch_size)(inputs))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=projection_dim)(x1, x1)
        x2 = layers.Add()([attention, encoded])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        x3 = layers.Dense(projection_dim, activation=keras.activations.gelu)(x3)
        encoded = layers.Add()([x3, x2])
    representation = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded))
    return keras.Model(inputs=inputs, outputs=layers.Dense(10)(representation))


def run_experiment(model, x, y):
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(5, name="top-5-accuracy"),
        ],
    )
    filepath = "tmp/checkpoint.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(
        filepath, monitor="val_accuracy", save_best_only=True, save_weights_only=True
    )
    history = model.fit(x=x, y=y, batch_size=100, epochs=2, validation_split=0.1, callbacks=[checkpoint], verbose=2)
    model.load_weights(filepath)
    return history


if __name__ == "__main__":
    keras.utils.set_random_seed(14)
    data = np.load("digits.npz")
    history = run_experiment(create_vit_classifier(), data["images"][:1000, ..., None] / 16.0, data["labels"][:1000])
    print(json.dumps(history.history))
