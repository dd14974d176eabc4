"""Reports a training to MLflow and to Weights & Biases, as on one device, and prints what each rank has reported."""

import json
import os
import sys
from pathlib import Path

import keras
import mlflow
import numpy as np
import tensorflow as tf
import wandb
from wandb.integration.keras import WandbMetricsLogger

folder = Path(sys.argv[1])
mlflow.set_tracking_uri((folder / "mlflow").as_uri())
x = np.random.RandomState(0).rand(33, 4).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rank = getattr(tf.distribute.get_strategy(), "rank", 0)
with mlflow.start_run() as started, wandb.init(mode="offline", dir=os.fspath(folder)) as run:
    callbacks = [mlflow.keras.MlflowCallback(), WandbMetricsLogger(log_freq="batch")]
    history = model.fit(x, y, batch_size=8, epochs=3, validation_data=(x, y), verbose=0, callbacks=callbacks).history
    to_wandb = {name: value for name, value in dict(run.summary).items() if not name.startswith("_")}
mlflow.flush_async_logging()
stored = mlflow.get_run(started.info.run_id).data
steps = mlflow.MlflowClient().get_metric_history(started.info.run_id, "loss")
found = {
    "history": history,
    "wandb": to_wandb,
    "mlflow": stored.metrics,
    "epochs": [each.step for each in steps],
    "parameters": sorted(stored.params),
}
(folder / f"{rank}.json").write_text(json.dumps(found))
