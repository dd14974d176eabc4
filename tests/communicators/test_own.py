"""A transport of one's own: the contract of `tfrep.Communicator` is all that a strategy needs."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

SECONDS = 60.0


class FolderCommunicator(tfrep.Communicator):
    """Talks through files in a shared folder."""

    name = "folder"

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._messages = itertools.count()

    def _exchange(self, array: np.ndarray) -> list[np.ndarray]:
        number = next(self._messages)
        own = os.path.join(self.folder, f"{number}-{self.rank}.npy")
        with open(own + ".part", "wb") as file:
            np.save(file, array)
        os.replace(own + ".part", own)
        deadline, arrays = time.monotonic() + SECONDS, []
        for rank in range(self.size):
            path = os.path.join(self.folder, f"{number}-{rank}.npy")
            while not os.path.exists(path):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} sent nothing")
                time.sleep(0.001)
            arrays.append(np.load(path))
        return arrays

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        reduce = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}[op]
        results = []
        # One after the other, in the order in which the program has them.
        for tensor in map(tf.convert_to_tensor, tensors):
            with tf.control_dependencies(results[-1:]):
                result = tf.numpy_function(
                    lambda array: reduce(self._exchange(array), axis=0).astype(array.dtype), [tensor], tensor.dtype
                )
            results.append(tf.ensure_shape(result, tensor.shape))
        return results

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        gathered = tf.numpy_function(lambda array: np.concatenate(self._exchange(array)), [tensor], tensor.dtype)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        return [
            tf.numpy_function(lambda array: self._exchange(array)[root], [tensor], tensor.dtype) for tensor in tensors
        ]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        raise tfrep.errors.ConfigurationError("Folders have no all_to_all.")

    def subgroup(self, ranks: Sequence[int]) -> tfrep.Communicator | None:
        raise tfrep.errors.ConfigurationError("Folders have no subgroups.")


def train(strategy: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    rng = np.random.RandomState(0)
    x, y = rng.randn(13, 3).astype("float32"), rng.randn(13, 1).astype("float32")
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def train_through_folder(strategy: Any, folder: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    own = tfrep.MultiWorkerStrategy(FolderCommunicator(folder, strategy.rank, strategy.num_replicas_in_sync))
    return train(own)


def test_a_transport_of_ones_own_trains(tmp_path: Any, worker_pool: Any) -> None:
    weights, history = train(tf.distribute.get_strategy())
    for rank_weights, rank_history in worker_pool("tf", 2).run(train_through_folder, str(tmp_path)):
        for found, want in zip(rank_weights, weights, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rank_history["loss"], history["loss"], rtol=1e-5)
