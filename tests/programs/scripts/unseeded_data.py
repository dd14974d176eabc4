"""The shortest script of all, with random data and no seed, in the manner of a question on a forum."""

import json

import numpy as np
from tensorflow import keras

rng = np.random.default_rng()
x_train = rng.random((200, 10))
y_train = rng.integers(2, size=(200, 1))

model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(x_train, y_train, epochs=2, batch_size=32)
print(json.dumps({"loss": history.history["loss"]}))
