"""A search over a grid with clear_session between models, and the best in a JSON file, in the manner of a homework."""

import itertools
import json
import os
from datetime import datetime

import numpy as np
import tensorflow as tf

OUT = os.path.join("results", "run")
os.makedirs(OUT, exist_ok=True)
data = np.load("digits.npz")
x, y = data["images"].reshape(-1, 64).astype("float32") / 16.0, data["labels"]
x_train, x_valid, y_train, y_valid = x[:900], x[900:1200], y[:900], y[900:1200]


def run_trial(units, activation, lr):
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.models.Sequential()
    model.add(tf.keras.Input(shape=(64,)))
    model.add(tf.keras.layers.Dense(units, activation=activation))
    model.add(tf.keras.layers.Dense(10, activation="softmax"))
    model.compile(
        optimizer=tf.keras.optimizers.SGD(learning_rate=lr, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(x_train, y_train, epochs=1, batch_size=64, verbose=0)
    loss, accuracy = model.evaluate(x_valid, y_valid, verbose=0)
    return {"units": units, "activation": activation, "lr": lr, "loss": loss, "accuracy": accuracy}


trials = []
for units, (activation, lr) in itertools.product([8, 16], [("tanh", 0.1), ("elu", 0.03)]):
    trials.append(run_trial(units, activation, lr))
    print(datetime.now().strftime("%H:%M:%S"), trials[-1])
best = min(trials, key=lambda trial: trial["loss"])
with open(os.path.join(OUT, "best_params.json"), "w") as f:
    json.dump(best, f, indent=2)
print(json.dumps({"trials": trials, "best": best}))
