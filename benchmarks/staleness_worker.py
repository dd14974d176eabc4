"""One training on the digits: the coordinator's process of `benchmarks.staleness`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MODES: dict[str, dict[str, Any] | None] = {
    "one device": None,
    "asynchronous": {},
    "max_in_flight=1": {"max_in_flight": 1},
    "sync": {"sync": True},
    "sync, 1 backup worker": {"sync": True, "replicas_to_aggregate": 1},
}

_BATCH, _EPOCHS = 32, 10


def main(mode: str, seed: int) -> None:
    """Trains for 10 epochs, and prints what came out as JSON.

    Args:
        mode: One of `MODES`.
        seed: Of the initial weights and the order of the examples.

    Example:
        >>> main("sync", 0)
    """
    import contextlib

    import keras
    import tensorflow as tf

    import tfrep_strategy as tfrep
    from tfrep_strategy.digits import load_digits

    settings = MODES[mode]
    scope: Any = contextlib.nullcontext()
    if settings is not None:
        cluster = tf.train.ClusterSpec(json.loads(os.environ["BENCHMARK_CLUSTER"]))
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
        scope = tfrep.ParameterServerStrategy(resolver, **settings).scope()
    keras.utils.set_random_seed(seed)
    train, test = load_digits()
    with scope:
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # A rate that decays over the updates that are made: the accuracy of the last ones is not one of chance.
        updates = _EPOCHS * -(-len(train.labels) // _BATCH) // (2 if settings and settings.get("sync") else 1)
        rate = keras.optimizers.schedules.CosineDecay(1e-2, updates)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    history = model.fit(train.images, train.labels, batch_size=_BATCH, epochs=_EPOCHS, verbose=0).history
    result = {
        "accuracy": model.evaluate(test.images, test.labels, verbose=0)[1],
        "train_loss": history["loss"],
        "updates": int(model.optimizer.iterations),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
