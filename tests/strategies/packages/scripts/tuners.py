"""Searches with KerasTuner's three tuners, twice: the second time goes on with the projects of the first."""

import json
import sys

import keras
import keras_tuner as kt
import numpy as np

given = {"seed": 5} if "seeded" in sys.argv else {}
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(48, 3)).astype("f")
y = x.sum(1, keepdims=True)


def build(hp):
    layers = [keras.Input((3,))]
    for units in (hp.Int("units", 2, 6, step=2), 1):
        layers.append(keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(units)))
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(hp.Choice("lr", [0.01, 0.02, 0.05])), "mse")
    return model


KINDS = {kt.RandomSearch: {"max_trials": 3}, kt.Hyperband: {"max_epochs": 3}, kt.BayesianOptimization: {"max_trials": 4}}
found = []
for overwrite in (True, False):
    for kind, limits in KINDS.items():
        tuner = kind(build, "val_loss", directory="tuned", project_name=kind.__name__, overwrite=overwrite, **limits, **given)
        tuner.search(x, y, epochs=2, batch_size=8, shuffle=False, validation_data=(x, y), verbose=0)
        best = tuner.get_best_hyperparameters(1)[0].values
        score = tuner.get_best_models(1)[0].evaluate(x, y, verbose=0)
        trials = tuner.oracle.get_best_trials(100)
        found.append([best["units"], best["lr"], score, [trial.score for trial in trials if trial.score is not None]])
print("RESULT", json.dumps(found))
