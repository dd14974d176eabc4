"""Batches given one by one to train_on_batch and test_on_batch, in the manner of Keras scripts before tf.data."""

import json

import keras
import numpy as np

rng = np.random.RandomState(10)
keras.utils.set_random_seed(10)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64).astype("float32") / 16, data["labels"].astype("int32")
x_train, y_train, x_test, y_test = x[:1000], y[:1000], x[1000:1100], y[1000:1100]

model = keras.models.Sequential()
model.add(keras.layers.Dense(32, activation="selu", kernel_initializer="lecun_normal", input_shape=(64,)))
model.add(keras.layers.Dense(10, activation="softmax"))
model.compile(keras.optimizers.Adagrad(0.05), "sparse_categorical_crossentropy", metrics=["acc"])


def batches(x, y, size):
    order = rng.permutation(len(x))
    for start in range(0, len(x), size):
        chosen = order[start : start + size]
        yield x[chosen], y[chosen]


report = []
for epoch in range(2):
    model.reset_metrics()
    for batch_x, batch_y in batches(x_train, y_train, 90):
        logs = model.train_on_batch(batch_x, batch_y, return_dict=True)
    val = [model.test_on_batch(x_test[i : i + 1], y_test[i : i + 1]) for i in range(3)]
    print(f"epoch {epoch}: {logs}, validation {val[-1]}")
    report.append({"train": {k: float(v) for k, v in logs.items()}, "val": np.array(val, float).tolist()})
guess = model.predict_on_batch(x_test[:1])
np.savetxt("guess.txt", guess)
print(json.dumps({"report": report, "guess": np.asarray(guess).tolist()}))
