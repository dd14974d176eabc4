"""A transport of your own: processes of one machine talk through files in a folder.

    python examples/own_transport.py

It starts two processes, which train over the transport, and compares their losses with
those of one device. A transport is a subclass of `tfrep.Communicator` with three
methods. Half a minute on two cores.

A package that declares the entry point `folder = own_transport:FolderCommunicator` in
the group `tfrep_strategy.communicators` gives it to every script:
`TALK_FOLDER=/tmp/talk tfrep run -n 2 --communicator folder train.py`, with a new folder
for each run.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

SECONDS = 60.0
"""How long a rank waits for another."""


class FolderCommunicator(tfrep.Communicator):
    """Writes what this rank sends into a file, and reads the files of the others."""

    name = "folder"

    def __init__(self, environment: Any, folder: Path | None = None) -> None:
        self.rank, self.size = environment.rank, environment.size
        self._folder = folder or Path(os.environ["TALK_FOLDER"])
        self._folder.mkdir(exist_ok=True)
        self._messages = itertools.count()

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        reductions: dict[str, Callable[..., Any]] = {
            "sum": np.sum,
            "mean": np.mean,
            "min": np.min,
            "max": np.max,
            "product": np.prod,
        }
        reduce = reductions[op]
        return [
            tf.ensure_shape(
                self._talk(tensor, lambda parts: reduce(np.stack(parts), 0).astype(parts[0].dtype)),
                tensor.shape,
            )
            for tensor in map(tf.convert_to_tensor, tensors)
        ]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return tf.ensure_shape(self._talk(tensor, np.concatenate), [None, *tensor.shape[1:]])

    def subgroup(self, ranks: Sequence[int]) -> tfrep.Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        group = FolderCommunicator(self, self._folder / "-".join(map(str, ranks)))
        group.rank, group.size = ranks.index(self.rank), len(ranks)
        return group

    def _talk(
        self, tensor: tf.Tensor, combine: Callable[[list[np.ndarray]], np.ndarray]
    ) -> tf.Tensor:
        """Adds an operation that meets the other ranks; a function runs them in their order."""
        return tf.numpy_function(
            lambda array: combine(self._exchange(array)), [tensor], tensor.dtype
        )

    def _exchange(self, array: np.ndarray) -> list[np.ndarray]:
        number, deadline = next(self._messages), time.monotonic() + SECONDS
        own = self._folder / f"{number}-{self.rank}"
        own.with_suffix(".part").write_bytes(array.tobytes())
        own.with_suffix(".part").replace(own)
        parts = []
        for rank in range(self.size):
            path = self._folder / f"{number}-{rank}"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} sent nothing")
                time.sleep(0.001)
            parts.append(
                np.frombuffer(path.read_bytes(), array.dtype).reshape(-1, *array.shape[1:])
            )
        return parts if array.ndim else [part[0] for part in parts]


def train() -> list[float]:
    """Trains as on one device: nothing here knows of replicas."""
    keras.utils.set_random_seed(0)
    (x, y), _ = load_digits()
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return list(model.fit(x, y, batch_size=64, epochs=3, verbose=0).history["loss"])


def train_over_the_folder(folder: str) -> list[float]:
    """Is called in each process of a run."""
    os.environ["TALK_FOLDER"] = folder
    tfrep.register_communicator("folder", FolderCommunicator)
    with tfrep.MultiWorkerStrategy("folder").scope():
        return train()


def main() -> None:
    one_device = train()
    with tempfile.TemporaryDirectory() as folder:
        first, second = tfrep.launch(
            train_over_the_folder, (folder,), num_replicas=2, communicator="tf", strategy=None
        )
    assert first == second
    print("One device:   ", one_device)
    print("Two processes:", first)
    print(json.dumps({"difference": float(np.abs(np.subtract(first, one_device)).max())}))


if __name__ == "__main__":
    main()
