"""Trains on shards of Ray Data on two workers of Ray, then on the whole data on one device. Prints what both have learned."""

import json
import tempfile
from pathlib import Path

import numpy as np

ROWS, SIZE = 32, 2


def rows():
    """The data: three numbers a row, and their sum."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def learn(strategy, data):
    """Trains, and returns what was learned."""
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(data, epochs=3, verbose=0).history
    return {"weights": [float(value) for weight in model.get_weights() for value in weight.ravel()], "history": history}


def work(config):
    """Trains on this worker's shard, and tells which rows are in it."""
    import ray.train

    import tfrep_strategy as tfrep

    strategy = tfrep.MultiWorkerStrategy()
    shard = ray.train.get_dataset_shard("train")

    def read(context):
        """The function returns what one worker's replica gets in each step."""
        size = context.get_per_replica_batch_size(ROWS)
        return shard.to_tf(feature_columns="x", label_columns="y", batch_size=size)

    found = learn(strategy, strategy.distribute_datasets_from_function(read))
    own = sorted(float(value) for batch in shard.iter_batches(batch_size=None) for value in batch["y"].ravel())
    found["rows"] = tfrep.all_gather_object(own)
    if tfrep.is_chief():
        Path(config["file"]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    import ray
    import tensorflow as tf
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    x, y = rows()
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
        file = Path(folder, "found.json")
        TensorflowTrainer(
            work,
            train_loop_config={"file": str(file)},
            scaling_config=ScalingConfig(num_workers=SIZE),
            run_config=RunConfig(storage_path=folder),
            datasets={"train": ray.data.from_items([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])},
        ).fit()
        found = file.read_text("utf-8")
        ray.shutdown()
    print("FOUND " + found)
    alone = learn(tf.distribute.get_strategy(), tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS))
    print("FOUND " + json.dumps(alone | {"rows": sorted(map(float, y.ravel()))}))
