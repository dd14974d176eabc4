"""`tf.train.Checkpoint` on several processes: all save to the same path, and one process writes it."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import run_write_callbacks, without_checkpoint_state
from tfrep_strategy.keras_integration.synchronous.saving import written_once

_find_strategy: Callable[[], Any] | None = None


def write_checkpoints_once(find_strategy: Callable[[], Any]) -> None:
    """Makes `tf.train.Checkpoint` write each path on one process only: the lowest rank that saves to this path.

    Saving reads variables that only all processes together can read. So every process must save. They collect these values
    first. Then one writes, and the others neither write nor keep anything.

    Args:
        find_strategy: Returns the strategy that connects the processes; None if they are not connected.
    """
    global _find_strategy
    if _find_strategy is None:
        tf.train.Checkpoint.save = _saved_now(tf.train.Checkpoint.save)
        tf.train.Checkpoint._write = _saved_now(_written_once(tf.train.Checkpoint._write))
    _find_strategy = find_strategy


def _strategy() -> Any:
    strategy = None if _find_strategy is None else _find_strategy()
    return None if strategy is None or strategy.num_replicas_in_sync == 1 else strategy


def _saved_now(save: Any) -> Any:
    @functools.wraps(save)
    def save_now(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if _strategy() is not None and options and options.experimental_enable_async_checkpoint:
            # A background thread would run collectives while the training runs its own.
            warnings.warn(
                "With several processes a checkpoint is written synchronously, not in the background.", stacklevel=2
            )
            options = copy.copy(options)
            options.experimental_enable_async_checkpoint = False
        return save(self, file_prefix, options)

    return save_now


def _written_once(write: Any) -> Any:
    @functools.wraps(write)
    def write_once(self: Any, file_prefix: Any, options: Any = None) -> Any:
        strategy = _strategy()
        if strategy is None:
            return write(self, file_prefix, options)
        path = os.fspath(file_prefix)
        with written_once(strategy, path) as writes:
            if writes:
                return write(self, path, options)
        # A `tf.train.CheckpointManager` updates its list of checkpoints in them. The other process has written its file.
        with without_checkpoint_state():
            run_write_callbacks(options.experimental_write_callbacks or [] if options else [], path)
        return path

    return write_once
