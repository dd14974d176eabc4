"""Reports to MLflow by its functions, and to Weights & Biases, which is told nothing of who reports."""

import json
import os

import keras
import mlflow
import numpy as np
import wandb

import tfrep_strategy as tfrep

mlflow.set_tracking_uri("file://" + os.path.abspath("runs"))
mlflow.set_experiment("an experiment")
for number in range(2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with mlflow.start_run():
        mlflow.log_param("number", number)
        mlflow.log_metric("loss", model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0).history["loss"][-1])
seen = mlflow.search_runs(output_format="list")
with wandb.init(project="a project", mode="offline" if tfrep.is_chief() else None) as run:
    run.log({"loss": 1.0})
print(
    "RESULT",
    json.dumps([len(seen), os.environ.get("WANDB_MODE"), "tfrep-mlflow-" in mlflow.get_tracking_uri()]),
)
