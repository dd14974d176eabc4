"""Saving: every process may ask for the same file, and one writes it."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

from tfrep_strategy.errors import PeerError
from tfrep_strategy.keras_integration.internals import model_metadata
from tfrep_strategy.keras_integration.protocol import KerasStrategy
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.shared.model_files import ModelFiles, is_in_old_format, is_local
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.other_threads import answers_alone

is_coordinated = Setting(False)
"""Whether a caller further up has decided which process saves: `save` then writes without asking the other processes."""


class Saving(ModelFiles, SynchronousBase):
    """What is done with files of a model."""

    def save_model(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Writes each file once: of the processes that give the same path, the first one writes.

        All processes have to call it.
        """
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().save_model(original, model, filepath, overwrite, zipped, **kwargs)
            elif is_in_old_format(filepath, zipped):
                # Writing such a file takes the optimizer out of the settings that a clone is compiled with. Ranks stay alike.
                model_metadata(model, kwargs.get("include_optimizer", True))

    def save_weights(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes where `save_model` would."""
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().save_weights(original, model, filepath, *args, **kwargs)

    def export(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes where `save_model` would."""
        with written_once(self.strategy, filepath) as writes:
            if writes:
                super().export(original, model, filepath, *args, **kwargs)


@contextlib.contextmanager
def failing_together(strategy: KerasStrategy) -> Iterator[None]:
    """Makes what fails on one process fail on all, after all have come to the end of the block.

    Raises:
        Exception: The one of the first process that failed, on the others too if it can travel, else `PeerError`.
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
    """Yields whether this process writes a file: of those that give the same path, the first one does.

    All processes have to enter it, and leave it when the file is there. A block inside another one follows it.
    """
    if is_coordinated.value:
        yield True
        return
    if strategy.extended.keras_driver.is_other_thread:  # All ranks save then, or this one alone: nobody knows.
        with is_coordinated.to(True), answers_alone.to(True):
            yield strategy.extended.is_chief
        return
    strategy.extended.synchronize_new_variables()
    strategy.extended.merge_replica_state()
    is_path = isinstance(filepath, (str, os.PathLike))  # Else a file of this process.
    place = os.path.abspath(os.fspath(filepath)) if is_local(filepath) else os.fspath(filepath) if is_path else None
    is_first = strategy.extended.first_with([place])[0]
    strategy.extended.collect_parts(reads=is_first or not is_path)
    # Keras makes an optimizer of its own when it first saves, to see which attributes every optimizer has.
    with failing_together(strategy), is_coordinated.to(True), strategy.extended.acting_alone():
        try:
            yield is_first or not is_path
        finally:
            strategy.extended.release_parts()
