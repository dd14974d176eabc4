"""One timed training on parameter servers: the coordinator's process of `benchmarks.parameter_server`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BATCH, FEATURES, UNITS, CLASSES = 64, 64, 256, 10


def main(variant: str, steps: int, epochs: int) -> None:
    """Trains, and prints the seconds that each epoch but the first took, as JSON.

    Args:
        variant: "tf_keras" (stock), or "ours" or "ours, fed" (the coordinator reads the data).
        steps: Steps per epoch.
        epochs: How many epochs are timed.

    Example:
        >>> main("ours", 100, 3)
    """
    import numpy as np
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(json.loads(os.environ["BENCHMARK_CLUSTER"]))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    keras: Any
    if variant == "tf_keras":
        import tf_keras as keras

        strategy = tf.distribute.ParameterServerStrategy(resolver)
        creator = keras.utils.experimental.DatasetCreator
    else:
        import keras

        import tfrep_strategy as tfrep

        strategy = tfrep.ParameterServerStrategy(resolver)
        creator = tfrep.DatasetCreator

    rng = np.random.RandomState(0)
    x = rng.randn(BATCH * 32, FEATURES).astype("float32")
    y = rng.randint(0, CLASSES, BATCH * 32)

    def dataset_fn(context: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH).prefetch(2)

    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((FEATURES,)), keras.layers.Dense(UNITS, "relu"), keras.layers.Dense(CLASSES)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])

    times: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())

    data = dataset_fn() if variant == "ours, fed" else creator(dataset_fn)
    model.fit(data, epochs=epochs + 1, steps_per_epoch=steps, verbose=0, callbacks=[Clock()])
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    print("RESULT " + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
