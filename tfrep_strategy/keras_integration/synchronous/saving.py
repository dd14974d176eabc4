"""Saving models and checkpoints: every process may save to the same path, and one process writes it.

This includes `tf.train.Checkpoint` and `tf.saved_model.save`. Files of a checkpoint are on the disk before they are named.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.step import KerasStrategy
from tfrep_strategy.core.tf import run_write_callbacks, without_checkpoint_state
from tfrep_strategy.errors import PeerError, warn
from tfrep_strategy.keras_integration.internals import model_metadata
from tfrep_strategy.keras_integration.saving.model_files import ModelFiles, is_in_old_format, is_local
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.threads import answers_alone
from tfrep_strategy.keras_integration.whole_files import synchronize

is_coordinated = Setting(False)
"""Whether a caller has decided which process saves. Then `save` writes without asking the other processes."""


class Saving(ModelFiles, SynchronousBase):
    """Operations on the files of a model."""

    def save_model(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Writes each file once: of the processes that pass the same path, the first one writes.

        All processes must call it.
        """
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().save_model(original, model, filepath, overwrite, zipped, **kwargs)
            elif is_in_old_format(filepath, zipped):
                # Writing such a file removes the optimizer from the settings that a clone is compiled with. All ranks must do the
                # same.
                model_metadata(model, kwargs.get("include_optimizer", True))

    def save_weights(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes on the process that `save_model` would choose."""
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().save_weights(original, model, filepath, *args, **kwargs)

    def export(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes on the process that `save_model` would choose."""
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().export(original, model, filepath, *args, **kwargs)


@contextlib.contextmanager
def failing_together(strategy: KerasStrategy) -> Iterator[None]:
    """Makes an error on one process an error on all, after all have reached the end of the block.

    Raises:
        Exception: The error of the first process that failed. On the others it is a `PeerError` if it cannot be pickled.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failures = strategy.extended.all_gather_object(None if failure is None else (repr(failure), _pickled(failure)))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            description, pickled = other
            cause = PeerError(f"Rank {rank} failed: {description}")
            if pickled is None:
                raise cause
            raise pickle.loads(pickled) from cause


def _pickled(error: Exception) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


@contextlib.contextmanager
def written_once(strategy: KerasStrategy, filepath: Any) -> Iterator[bool]:
    """Yields whether this process writes a file: of the processes that pass the same path, the first one does.

    All processes must enter the block, and leave it when the file is complete. A nested block follows the outer one.
    """
    if is_coordinated.value:
        yield True
        return
    if strategy.extended.keras_driver.is_other_thread:  # It is unknown whether other ranks save as well.
        with is_coordinated.to(True), answers_alone.to(True):
            yield strategy.extended.is_chief
        return
    strategy.extended.synchronize_new_variables()
    strategy.extended.merge_replica_state()
    is_path = isinstance(filepath, (str, os.PathLike))  # Otherwise it is a file object of this process.
    place = os.path.abspath(os.fspath(filepath)) if is_local(filepath) else os.fspath(filepath) if is_path else None
    is_first = strategy.extended.first_with([place])[0]
    strategy.extended.collect_parts(reads=is_first or not is_path)
    # When Keras first saves, it makes an optimizer, to see which attributes every optimizer has.
    with failing_together(strategy), is_coordinated.to(True), strategy.extended.acting_alone():
        try:
            yield is_first or not is_path
        finally:
            strategy.extended.release_parts()


_find_strategy: Callable[[], Any] | None = None


def write_checkpoints_safely(find_strategy: Callable[[], Any]) -> None:
    """Makes `tf.train.Checkpoint`, and `tf.saved_model.save`, write each path on one process only.

    Saving reads variables that only all processes together can read, so every process must save. They collect these values
    first. Then the lowest rank that saves to a path writes. The others neither write nor keep anything.

    Args:
        find_strategy: Returns the strategy that connects the processes; None if they are not connected.
    """
    global _find_strategy
    _find_strategy = find_strategy


def _strategy() -> Any:
    strategy = None if _find_strategy is None else _find_strategy()
    return None if strategy is None or strategy.num_replicas_in_sync == 1 else strategy


def saved_now(save: Any) -> Any:
    """Wraps the saving of a checkpoint, so that several processes do not save in the background."""

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
    """Wraps the writing of a checkpoint, so that one process writes, and files are on the disk before they are named."""

    @functools.wraps(write)
    def write_once(self: Any, file_prefix: Any, options: Any = None) -> Any:
        strategy = _strategy()
        if strategy is None:
            return write(self, file_prefix, _with_first(_synchronize, options))
        path = os.fspath(file_prefix)
        with written_once(strategy, path) as writes:
            if writes:
                return write(self, path, _with_first(_synchronize, options))
        # A `tf.train.CheckpointManager` updates its list of checkpoints in the callbacks. The other process has written its file.
        with without_checkpoint_state():
            run_write_callbacks(options.experimental_write_callbacks or [] if options else [], path)
        return path

    return write_once


def exported_by_one(save: Any) -> Any:
    """Wraps the export of a model, so that one process writes."""

    @functools.wraps(save)
    def save_once(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> None:
        strategy = _strategy()
        with contextlib.nullcontext(True) if strategy is None else written_once(strategy, export_dir) as writes:
            if writes:
                save(obj, export_dir, *args, **kwargs)

    return save_once


def _with_first(callback: Callable[[Any], None], options: Any) -> Any:
    """Returns options that call a callback first when the files are written."""
    options = tf.train.CheckpointOptions() if options is None else copy.copy(options)
    options.experimental_write_callbacks = [callback, *(options.experimental_write_callbacks or [])]
    return options


def _synchronize(prefix: Any) -> None:
    """Returns when the files of a checkpoint are on the disk. A `tf.train.CheckpointManager` names them later."""
    if isinstance(prefix, str) and is_local(prefix):
        files = [*glob.glob(f"{glob.escape(prefix)}.data-*"), *glob.glob(f"{glob.escape(prefix)}.index")]
        for path in [*files, *({os.path.dirname(prefix) or "."} if files else ())]:
            synchronize(path)
