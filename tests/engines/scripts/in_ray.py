"""Trains on two workers of Ray, then on one device. Prints what both have learned."""

import json
import tempfile
from pathlib import Path


def learn():
    """Trains, and returns what was learned, and who took part."""
    import keras
    import numpy as np

    import tfrep_strategy as tfrep

    keras.utils.set_random_seed(0)
    strategy = tfrep.MultiWorkerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")
    history = model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=3, verbose=0).history
    weights = [float(value) for weight in model.get_weights() for value in weight.ravel()]
    ranks = tfrep.all_gather_object(strategy.rank)
    return {"weights": weights, "history": history, "ranks": ranks, "communicator": strategy.communicator.name}


def work(config):
    """Is called on each worker of Ray, which sets TF_CONFIG before."""
    import tfrep_strategy as tfrep

    found = learn()
    if tfrep.is_chief():
        Path(config["file"]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
        file = Path(folder, "found.json")
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
        TensorflowTrainer(work, train_loop_config={"file": str(file)}, scaling_config=scaling, run_config=run).fit()
        found = file.read_text("utf-8")
        ray.shutdown()
    print("FOUND " + found)
    print("FOUND " + json.dumps(learn()))
