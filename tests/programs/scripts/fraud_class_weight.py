"""Rare cases weighed by class, with many metrics and a bias that starts right, in the manner of Keras's fraud detection."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(33)
rng = np.random.default_rng(33)
features = rng.normal(size=(2000, 10)).astype("float32")
targets = ((features[:, 0] + features[:, 1] > 2.2) & (features[:, 2] > 0)).astype("uint8")[:, None]

num_val_samples = int(len(features) * 0.2)
train_features, val_features = features[:-num_val_samples], features[-num_val_samples:]
train_targets, val_targets = targets[:-num_val_samples], targets[-num_val_samples:]
counts = np.bincount(train_targets[:, 0])
print(f"Positive samples: {counts[1]} ({100 * counts[1] / len(train_targets):.2f}% of total)")
class_weight = {0: 1.0 / counts[0], 1: 1.0 / counts[1]}
mean, std = np.mean(train_features, axis=0), np.std(train_features, axis=0)
train_features, val_features = (train_features - mean) / std, (val_features - mean) / std

output_bias = keras.initializers.Constant(np.log(counts[1] / counts[0]))
model = keras.Sequential(
    [
        keras.Input(shape=train_features.shape[1:]),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1, activation="sigmoid", bias_initializer=output_bias),
    ]
)
metrics = [
    keras.metrics.FalseNegatives(name="fn"),
    keras.metrics.FalsePositives(name="fp"),
    keras.metrics.TrueNegatives(name="tn"),
    keras.metrics.TruePositives(name="tp"),
    keras.metrics.Precision(name="precision"),
    keras.metrics.Recall(name="recall"),
    keras.metrics.AUC(name="prc", curve="PR"),
]
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=metrics)
history = model.fit(
    train_features,
    train_targets,
    batch_size=256,
    epochs=3,
    verbose=2,
    validation_data=(val_features, val_targets),
    class_weight=class_weight,
)
hard = 1.0 + np.abs(val_features[:, 0])
weighted = model.evaluate(val_features, val_targets, sample_weight=hard, verbose=0, return_dict=True)
pd_like = {name: values[-1] for name, values in history.history.items()}
print(json.dumps({"last": pd_like, "loss": history.history["loss"], "weighted": weighted["loss"]}))
