"""Saving: every process may ask for the same file, and one writes it."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import keras

from tfrep_strategy.errors import PeerError
from tfrep_strategy.keras_integration.patching import keras_internal, replace_everywhere, replaces
from tfrep_strategy.keras_integration.protocol import KerasStrategy, current_strategy
from tfrep_strategy.keras_integration.trainer import strategy_of


class _Coordination(threading.local):
    """Whether a caller further up has already decided which process saves."""

    done = False


_coordination = _Coordination()


@contextlib.contextmanager
def already_coordinated() -> Iterator[None]:
    """Lets `save` write without asking the other processes, which may not call it."""
    before, _coordination.done = _coordination.done, True
    try:
        yield
    finally:
        _coordination.done = before


def is_coordinated() -> bool:
    """Whether a caller further up has decided which process saves."""
    return _coordination.done


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
    failures = strategy.all_gather_object(None if failure is None else (repr(failure), _pickled(failure)))
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


def _is_legacy(filepath: Any) -> bool:
    """Whether Keras writes a whole model to this path in its old format."""
    name = str(filepath)
    return name.endswith((".h5", ".hdf5")) and not name.endswith(".weights.h5")


_legacy_metadata = keras_internal("legacy.saving.saving_utils", "model_metadata")


@contextlib.contextmanager
def written_once(strategy: KerasStrategy, filepath: Any) -> Iterator[bool]:
    """Yields whether this process writes a file: of those that give the same path, the first one does.

    All processes have to enter it, and leave it when the file is there.
    """
    strategy.synchronize_new_variables()
    strategy.merge_replica_state()
    strategy.collect_sums()
    is_path = isinstance(filepath, (str, os.PathLike))  # Else a file of this process.
    is_first = strategy.first_with([os.path.abspath(os.fspath(filepath)) if is_path else None])[0]
    # Keras makes an optimizer of its own when it first saves, to see which attributes every optimizer has.
    with failing_together(strategy), already_coordinated(), strategy.acting_alone():
        yield is_first or not is_path


def _saves_together(save: Any) -> Any:
    @functools.wraps(save)
    def save_once(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes each file once: of the processes that give the same path, the first one writes.

        All processes have to call it.
        """
        strategy = strategy_of(model) if isinstance(model, keras.Model) else None
        if strategy is None or is_coordinated():
            return save(model, filepath, *args, **kwargs)
        with written_once(strategy, filepath) as writes:
            if writes:
                save(model, filepath, *args, **kwargs)
            elif _is_legacy(filepath):
                # Writing such a file takes the optimizer out of the settings that a clone is compiled with. Ranks stay alike.
                _legacy_metadata(model, kwargs.get("include_optimizer", True))
        return None

    return save_once


for _name in ("save", "save_weights", "export"):
    replaces(keras.Model, _name)(lambda save, *args, **kwargs: _saves_together(save)(*args, **kwargs))
for _function in (keras.saving.save_model, keras.saving.save_weights):
    replace_everywhere(_function, _saves_together(_function))


@replaces(type(keras.export.ExportArchive()), "write_out")
def write_archive(original: Any, self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Writes an archive where `save` would; all processes have to call it."""
    tracked = [strategy_of(each) for each in getattr(self, "_tracked", []) if isinstance(each, keras.Model)]
    strategy = next(filter(None, tracked), None) or current_strategy()
    if strategy is None or is_coordinated():
        return original(self, filepath, *args, **kwargs)
    with written_once(strategy, filepath) as writes:
        if writes:
            original(self, filepath, *args, **kwargs)
    return None


@replaces(keras_internal("utils.file_utils"), "makedirs")
def makedirs(original: Any, path: Any) -> None:
    """Makes a folder that another process may make at the same time: Keras looks first whether it exists."""
    try:
        original(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
