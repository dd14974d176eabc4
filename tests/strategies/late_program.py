"""A program of one rank that makes its strategy late: `python late_program.py COMMUNICATOR WAY RANK FOLDER`.

Before that it prepares data and tries a model, as the first cells of a notebook do. Rank RANK kills itself in the middle
of the training if WAY is "kill". The weights are left in FOLDER as `weights<rank>.npz`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep


def prepared() -> tf.data.Dataset:
    """Runs operations, some on devices by their short names, and returns a data set of tensors that they have made."""
    keras.layers.StringLookup(vocabulary=["a"])(tf.constant(["a"]))
    with tf.device("CPU:0"):
        tf.zeros([1])
    x = tf.random.stateless_normal([37, 4], seed=[1, 2])
    x = (x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0)
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])(x)
    return tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).batch(8)


def trained(data: tf.data.Dataset, callbacks: list[keras.callbacks.Callback]) -> list[np.ndarray]:
    """Trains a small model and returns its weights."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    return model.get_weights()


def main(communicator: str, way: str, rank: int, folder: Path) -> None:
    from peer_programs import EndInEpoch

    data = prepared()
    strategy = tfrep.MultiWorkerStrategy(communicator)
    ends = way == "kill" and strategy.rank == rank
    with strategy.scope():
        weights = trained(data, [EndInEpoch(way, folder)] if ends else [])
    np.savez(folder / f"weights{strategy.rank}.npz", *weights)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
