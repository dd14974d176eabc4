"""The files of models are whole or not there, whatever Keras writes."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import (
    H5IOStore,
    ask_to_proceed_with_overwrite,
    is_remote_path,
    save_state,
)
from tfrep_strategy.keras_integration.shared import hdf5_files
from tfrep_strategy.keras_integration.shared.files import shown_as, written_whole


class ModelFiles(KerasDriver):
    """Writes the files of a model.

    Keras is given the path of a file that is not there yet, so what it would ask about overwriting is asked before.
    """

    def save_model(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Writes a model: a file of Keras's format or of the old one, or a folder."""
        if not is_local(filepath):
            return original(model, filepath, overwrite, zipped, **kwargs)
        if not _may_write(filepath, overwrite):
            return None
        old, in_folder = is_in_old_format(filepath, zipped), zipped is not None and not zipped
        size = num_bytes(model, kwargs.get("include_optimizer", True))
        with written_whole(filepath, size, parents=old or in_folder) as unfinished:
            if old:
                with hdf5_files.open_to_write(unfinished) as file:
                    original(model, file, True, zipped, **kwargs)
            else:
                original(model, unfinished, True, zipped, **kwargs)
        return None

    def save_weights(
        self, original: Any, model: Any, filepath: Any, overwrite: bool = True, max_shard_size: Any = None, **kwargs: Any
    ) -> None:
        """Writes weights, to one file or to several."""
        if not is_local(filepath):
            return original(model, filepath, overwrite, max_shard_size, **kwargs)
        if not _may_write(filepath, overwrite):
            return None
        size = 0 if kwargs.get("objects_to_skip") is not None else num_bytes(model)
        largest = None if max_shard_size is None else int(max_shard_size * 2**30)
        with written_whole(filepath, size, largest) as unfinished:
            original(model, unfinished, True, max_shard_size, **kwargs)
        return None

    def export(self, original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a model to be served."""
        if not is_local(filepath):
            return original(model, filepath, *args, **kwargs)
        size = num_bytes(model, optimizer=False)
        with written_whole(filepath, size, parents=True) as unfinished, shown_as(unfinished, filepath):
            original(model, unfinished, *args, **kwargs)
        return None


def weights_in_memory(model: Any) -> io.BytesIO:
    """Copies the weights of a model, and the variables of its optimizer.

    Args:
        model: A Keras model.

    Returns:
        What `save_weights` writes to a file.
    """
    content = io.BytesIO()
    store = H5IOStore(content, mode="w")
    save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    store.close()
    return content


def _may_write(filepath: str | os.PathLike[str], overwrite: bool) -> bool:
    """Asks the user, as Keras does, before a file is replaced."""
    return overwrite or not os.path.exists(filepath) or ask_to_proceed_with_overwrite(str(filepath))


def is_in_old_format(filepath: Any, zipped: bool | None = None) -> bool:
    """Whether Keras writes a whole model to this path in its old format."""
    return (zipped is None or bool(zipped)) and str(filepath).endswith((".h5", ".hdf5"))


def num_bytes(model: Any, optimizer: bool = True) -> int:
    """Counts the bytes of a model's variables, which a file of it has at least.

    Args:
        model: A Keras model.
        optimizer: Whether those of its optimizer are written, too.
    """
    variables = [*model.variables, *(getattr(getattr(model, "optimizer", None), "variables", []) if optimizer else [])]
    shapes = {id(v): (v.shape, tf.as_dtype(v.dtype).size) for v in variables if v.shape is not None}
    return sum(math.prod(shape) * size for shape, size in shapes.values())


def is_local(filepath: Any) -> bool:
    """Whether a path is one of this machine's; else it is an open file, or an address."""
    return isinstance(filepath, (str, os.PathLike)) and not is_remote_path(filepath)
