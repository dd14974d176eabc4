"""`tf.train.Checkpoint` on several processes: all may ask for the same file, and one writes it."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
import warnings
import weakref
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import run_write_callbacks, without_checkpoint_state

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
        tf.train.Checkpoint.save = _saved_now(tf.train.Checkpoint.save)
        tf.train.Checkpoint._write = _saved_now(_written_once(tf.train.Checkpoint._write))
    _strategy = weakref.ref(strategy)


def _saved_now(save: Any) -> Any:
    @functools.wraps(save)
    def save_now(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if _strategy is not None and _strategy() is not None and options and options.experimental_enable_async_checkpoint:
            # A thread of its own would talk to the other processes while training does.
            warnings.warn("Several processes write a checkpoint at once, not in the background.", stacklevel=2)
            options = copy.copy(options)
            options.experimental_enable_async_checkpoint = False
        return save(self, file_prefix, options)

    return save_now


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
        options = tf.train.CheckpointOptions() if options is None else copy.copy(options)
        callbacks, options.experimental_write_callbacks = options.experimental_write_callbacks or [], None
        with tempfile.TemporaryDirectory(prefix="tfrep-checkpoint-") as folder:
            write(self, os.path.join(folder, "unused"), options)
            strategy.barrier()
        # A `tf.train.CheckpointManager` keeps its books by them; what they write is written already.
        path = os.fspath(file_prefix)
        with without_checkpoint_state():
            run_write_callbacks(callbacks, path)
        return path

    return write_once
