"""Reports to a tracker that cannot log in: `python cannot_report.py PACKAGE`."""

import sys

import keras
import numpy as np


def with_wandb():
    import wandb

    return wandb.init(project="a project").log


def with_mlflow():
    import mlflow

    mlflow.set_tracking_uri("http://127.0.0.1:9")
    mlflow.start_run()
    return lambda logs: mlflow.log_metrics(logs)


report = globals()[f"with_{sys.argv[1]}"]()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
report({"loss": model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0).history["loss"][0]})
