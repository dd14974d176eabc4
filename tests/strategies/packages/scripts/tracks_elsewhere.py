"""Reports to a tracker without its server: `python tracks_elsewhere.py PACKAGE`. Rank 0 writes a run to a file."""

import json
import os
import sys

import keras
import numpy as np

import tfrep_strategy as tfrep


def with_comet_ml():
    import comet_ml

    run = comet_ml.OfflineExperiment(project_name="a project", offline_directory="reported")
    return run.log_metric, run.end


def with_neptune():
    import neptune

    run = neptune.init_run(project="a/project", mode=_MODE, capture_hardware_metrics=False)
    return lambda name, value, step: run[name].append(value, step=step), run.stop


def with_neptune_scale():
    import neptune_scale

    run = neptune_scale.Run(project="a/project", mode=_MODE, log_directory="reported")
    return lambda name, value, step: run.log_metrics({name: value}, step=step), run.close


if __name__ == "__main__":  # Neptune starts processes.
    _MODE = "offline" if tfrep.is_chief() else None
    report, end = globals()[f"with_{sys.argv[1]}"]()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses = model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, verbose=0).history["loss"]
    for step, loss in enumerate(losses):
        report("loss", loss, step=step)
    end()
    print("RESULT", json.dumps([losses, os.environ.get("NEPTUNE_MODE"), os.environ.get("COMET_AUTO_LOG_DISABLE")]))
