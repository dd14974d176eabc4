"""`tf.train.Checkpoint` on several processes: all may ask for the same file, and one writes it."""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from typing import Any

import tensorflow as tf

_strategy: weakref.ref[Any] | None = None


def write_checkpoints_once(strategy: Any) -> None:
    """Makes `tf.train.Checkpoint` write each path from the first process that gives it.

    Saving reads variables that only all processes together can read, so that the others take part, and write to a
    folder that is removed afterwards. Every process has to save.

    Args:
        strategy: The strategy that talks between the processes. The last one given is asked.
    """
    global _strategy
    if strategy.num_replicas_in_sync == 1:
        return
    if _strategy is None:
        tf.train.Checkpoint._write = _written_once(tf.train.Checkpoint._write)
    _strategy = weakref.ref(strategy)


def _written_once(write: Any) -> Any:
    @functools.wraps(write)
    def write_once(self: Any, file_prefix: Any, options: Any = None) -> Any:
        strategy = None if _strategy is None else _strategy()
        if strategy is None:
            return write(self, file_prefix, options)
        strategy.merge_replica_state()
        if strategy.first_with([os.path.abspath(os.fspath(file_prefix))])[0]:
            path = write(self, file_prefix, options)
            strategy.barrier()
            return path
        with tempfile.TemporaryDirectory(prefix="tfrep-checkpoint-") as folder:
            write(self, os.path.join(folder, "unused"), options)
            strategy.barrier()
        return tf.convert_to_tensor(file_prefix) if isinstance(file_prefix, tf.Tensor) else os.fspath(file_prefix)

    return write_once
