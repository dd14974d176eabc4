"""A study of Optuna that nothing has a seed for: pruned, stored, loaded again; and one that a clock ends."""

import json
import os
import sys

import keras
import numpy as np
import optuna

import tfrep_strategy as tfrep

how = sys.argv[1]
x = np.random.default_rng(0).normal(size=(64, 3)).astype("f")
y = x.sum(1, keepdims=True)


class Reports(keras.callbacks.Callback):
    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["loss"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned()


def objective(trial):
    keras.utils.set_random_seed(3)
    units, rate = trial.suggest_int("units", 2, 6), trial.suggest_float("rate", 1e-3, 0.2, log=True)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    if how == "fails on all" and trial.number == 1:
        raise ValueError(f"process {os.getpid()} cannot")
    if how == "fails on one" and trial.number == 1 and not tfrep.is_chief():
        raise OSError("this rank has no disk")
    return model.fit(x, y, epochs=3, batch_size=16, shuffle=False, verbose=0, callbacks=[Reports(trial)]).history["loss"][-1]


address = "sqlite:///study.db"
storage = {"url": address, "object": how == "object" and optuna.storages.RDBStorage(address)}.get(how)
pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
study = optuna.create_study(storage=storage, study_name="a" if storage else None, pruner=pruner, load_if_exists=True)
study.optimize(objective, n_trials=5, timeout=300, catch=(ValueError,))
if storage:
    study = optuna.load_study(study_name="a", storage=storage, pruner=pruner)
    study.optimize(objective, n_trials=1)
    assert len(optuna.load_study(study_name="a", storage=storage).trials) == 6
brief = optuna.create_study()
brief.optimize(lambda trial: trial.suggest_float("a", 0, 1), timeout=0.2)
print("RESULT", json.dumps([[[t.number, t.state.name, t.params, t.value] for t in each.trials] for each in (study, brief)]))
if storage and tfrep.is_chief():  # A program asks a study on one rank.
    print("BEST", study.best_trial.number)
