"""`tf.train.Checkpoint` and `tf.saved_model.save`: of several processes that save to a path, one writes it.

Files of a checkpoint are on the disk before they are named.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import run_write_callbacks, without_checkpoint_state
from tfrep_strategy.errors import warn
from tfrep_strategy.keras_integration.shared.model_files import is_local
from tfrep_strategy.keras_integration.shared.whole_files import synchronize
from tfrep_strategy.keras_integration.synchronous.saving import written_once

_find_strategy: Callable[[], Any] | None = None


def write_checkpoints_safely(find_strategy: Callable[[], Any]) -> None:
    """Makes `tf.train.Checkpoint`, and `tf.saved_model.save`, write each path on one process only.

    Saving reads variables that only all processes together can read. So every process must save. They collect these values
    first. Then the lowest rank that saves to a path writes, and the others neither write nor keep anything.

    Args:
        find_strategy: Returns the strategy that connects the processes; None if they are not connected.
    """
    global _find_strategy
    _find_strategy = find_strategy


def _strategy() -> Any:
    strategy = None if _find_strategy is None else _find_strategy()
    return None if strategy is None or strategy.num_replicas_in_sync == 1 else strategy


def saved_now(save: Any) -> Any:
    """Returns what saves a checkpoint: on several processes not in the background."""

    @functools.wraps(save)
    def save_now(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if _strategy() is not None and options and options.experimental_enable_async_checkpoint:
            # A background thread would run collectives while the training runs its own.
            warn("With several processes a checkpoint is written synchronously, not in the background.")
            options = copy.copy(options)
            options.experimental_enable_async_checkpoint = False
        return save(self, file_prefix, options)

    return save_now


def written_by_one(write: Any) -> Any:
    """Returns what writes a checkpoint: one process of several does, and files are on the disk before they are named."""

    @functools.wraps(write)
    def write_once(self: Any, file_prefix: Any, options: Any = None) -> Any:
        strategy = _strategy()
        if strategy is None:
            return write(self, file_prefix, _with_first(_synchronize, options))
        path = os.fspath(file_prefix)
        with written_once(strategy, path) as writes:
            if writes:
                return write(self, path, _with_first(_synchronize, options))
        # A `tf.train.CheckpointManager` updates its list of checkpoints in them. The other process has written its file.
        with without_checkpoint_state():
            run_write_callbacks(options.experimental_write_callbacks or [] if options else [], path)
        return path

    return write_once


def exported_by_one(save: Any) -> Any:
    """Returns what exports a model: one process of several does."""

    @functools.wraps(save)
    def save_once(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> None:
        strategy = _strategy()
        with contextlib.nullcontext(True) if strategy is None else written_once(strategy, export_dir) as writes:
            if writes:
                save(obj, export_dir, *args, **kwargs)

    return save_once


def _with_first(callback: Callable[[Any], None], options: Any) -> Any:
    """Returns options with which a callback is called first when the files are written."""
    options = tf.train.CheckpointOptions() if options is None else copy.copy(options)
    options.experimental_write_callbacks = [callback, *(options.experimental_write_callbacks or [])]
    return options


def _synchronize(prefix: Any) -> None:
    """Returns when the files of a checkpoint are on the disk. A `tf.train.CheckpointManager` names them later."""
    if isinstance(prefix, str) and is_local(prefix):
        files = [*glob.glob(f"{glob.escape(prefix)}.data-*"), *glob.glob(f"{glob.escape(prefix)}.index")]
        for path in [*files, *({os.path.dirname(prefix) or "."} if files else ())]:
            synchronize(path)
