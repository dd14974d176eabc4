"""K-fold cross-validation of a regression, a model per fold, in the manner of the Boston housing chapter of the textbook."""

import json

import keras
import numpy as np
from keras import layers

k, num_epochs = 3, 3


def build_model():
    model = keras.Sequential([layers.Dense(16, activation="softplus"), layers.Dense(1)])
    model.compile(optimizer="rmsprop", loss="mse", metrics=["mae"])
    return model


keras.utils.set_random_seed(12)
data = np.random.normal(size=(202, 13))
targets = data[:, 0] * 3 + np.abs(data[:, 1]) + 20
data = (data - data.mean(axis=0)) / data.std(axis=0)

num_val_samples = len(data) // k
all_mae_histories, all_scores = [], []
for i in range(k):
    print(f"Processing fold #{i}")
    val = slice(i * num_val_samples, (i + 1) * num_val_samples)
    partial_data = np.concatenate([data[: val.start], data[val.stop :]], axis=0)
    partial_targets = np.concatenate([targets[: val.start], targets[val.stop :]], axis=0)
    model = build_model()
    history = model.fit(
        partial_data,
        partial_targets,
        validation_data=(data[val], targets[val]),
        epochs=num_epochs,
        batch_size=16,
        verbose=0,
    )
    all_mae_histories.append(history.history["val_mae"])
    all_scores.append(model.evaluate(data[val], targets[val], verbose=0)[1])

average = [float(np.mean([x[i] for x in all_mae_histories])) for i in range(num_epochs)]
print("average", average, "score", np.mean(all_scores))
print(json.dumps({"average": average, "scores": all_scores}))
