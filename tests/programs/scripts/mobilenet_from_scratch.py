"""A network of keras.applications without weights on small pictures, in the manner of a first Kaggle notebook."""

import json

import keras
import numpy as np

IMG, CLASSES = 32, 10

with np.load("digits.npz") as data:
    images = np.repeat(np.kron(data["images"][:256], np.ones((4, 4), "uint8"))[..., None], 3, axis=-1)
    labels = data["labels"][:256]
x = keras.applications.mobilenet.preprocess_input(images.astype("float32") * 15)

backbone = keras.applications.MobileNet(
    input_shape=(IMG, IMG, 3), alpha=0.25, weights=None, include_top=False, pooling="avg"
)
model = keras.Sequential([backbone, keras.layers.Dropout(0.2), keras.layers.Dense(CLASSES, activation="softmax")])
model.compile(
    optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 8), momentum=0.9, nesterov=True),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top3")],
)
history = model.fit(x, labels, batch_size=64, epochs=2, verbose=2)
print(model.count_params(), "parameters")
print(json.dumps({"loss": history.history["loss"], "parameters": model.count_params()}))
