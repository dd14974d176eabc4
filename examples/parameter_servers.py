"""A model with a large embedding learns asynchronously, with parameter servers.

    python examples/parameter_servers.py
    python examples/parameter_servers.py --workers 4 --servers 2

The script starts workers and servers on this machine, and coordinates them. Variables
live on the servers. Each worker reads and updates them at its own speed, so the losses
differ from run to run. On many machines, leave out `local_cluster` and the argument of
the strategy, and set `TF_CONFIG` or use `srun`. A script without a strategy needs
`tfrep run --strategy parameter-server --workers 2 --servers 1 train.py`. Half a minute
on two cores.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep

USERS, FILMS = 2_000, 500


def make_ratings(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns users and films, and ratings from 0 to 1 that depend on both."""
    rng = np.random.default_rng(seed)
    users, films = rng.integers(0, USERS, count), rng.integers(0, FILMS, count)
    liked = np.sin(users % 5) * np.cos(films % 7) + rng.normal(0, 0.1, count)
    return {"user": users, "film": films}, (1 / (1 + np.exp(-3 * liked))).astype("float32")


def build_model() -> keras.Model:
    user, film = (keras.Input((), dtype="int64", name=name) for name in ("user", "film"))
    x = layers.concatenate([layers.Embedding(USERS, 16)(user), layers.Embedding(FILMS, 16)(film)])
    x = layers.Dense(32, activation="relu")(x)
    return keras.Model({"user": user, "film": film}, layers.Dense(1)(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratings, with parameter servers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of an epoch, all workers together")
    args = parser.parse_args()

    def read(context: Any) -> tf.data.Dataset:
        """Is called on each worker, which reads batches of its own."""
        ratings = make_ratings(50_000, seed=context.input_pipeline_id)
        return tf.data.Dataset.from_tensor_slices(ratings).shuffle(50_000).repeat().batch(64)

    with tfrep.local_cluster(workers=args.workers, servers=args.servers) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster)
        with strategy.scope():
            model = build_model()
            model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"])
        history = model.fit(
            tfrep.DatasetCreator(read), steps_per_epoch=args.steps, epochs=args.epochs, verbose=2
        )
        loss, error = model.evaluate(*make_ratings(5_000, seed=99), batch_size=500, verbose=0)
        model.save("ratings.keras")
    print(f"Mean error of a rating: {error:.3f}")
    print(json.dumps({"loss": history.history["loss"], "test_loss": loss}))


if __name__ == "__main__":
    main()
