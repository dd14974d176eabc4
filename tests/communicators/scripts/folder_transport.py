"""A transport in one file: processes of one machine talk through files in the folder `FOLDER_TRANSPORT`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

SECONDS = 60.0


class FolderCommunicator(tfrep.Communicator):
    """Writes what this rank sends into a file, and reads the files of the others."""

    name = "folder"

    def __init__(self, environment: Any, folder: Path | None = None) -> None:
        self.rank, self.size = environment.rank, environment.size
        self._folder = folder or Path(os.environ["FOLDER_TRANSPORT"])
        self._folder.mkdir(exist_ok=True)
        self._messages = itertools.count()

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        reduce = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}[op]
        return [
            tf.ensure_shape(self._talk(t, lambda parts: reduce(np.stack(parts), 0).astype(parts[0].dtype)), t.shape)
            for t in map(tf.convert_to_tensor, tensors)
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

    def _talk(self, tensor: tf.Tensor, combine: Any) -> tf.Tensor:
        """Adds an operation that meets the other ranks; the operations of a function run in their order."""
        return tf.numpy_function(lambda array: combine(self._exchange(array)), [tensor], tensor.dtype)

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
            parts.append(np.frombuffer(path.read_bytes(), array.dtype).reshape(-1, *array.shape[1:]))
        return parts if array.ndim else [part[0] for part in parts]
