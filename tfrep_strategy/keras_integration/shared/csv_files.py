"""Rows of a `CSVLogger` are whole: a run that goes on begins after the last whole one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, BinaryIO

import keras

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.shared.model_files import is_local


class CsvFiles(KerasDriver):
    """Adds what looks after rows to each list of callbacks."""

    def init_callbacks(self, original: Any, callback_list: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        """Puts what cuts off half a row before the callbacks that are given."""
        callbacks = list(keras.tree.flatten(callbacks)) if callbacks else []
        original(callback_list, [*beginning_whole(callbacks), *callbacks], *args, **kwargs)


def beginning_whole(callbacks: Iterable[Any]) -> list[keras.callbacks.Callback]:
    """Makes the callbacks that stand before others, so that each `CSVLogger` among these begins after a whole row."""
    return [_BeginsWhole(callback) for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


class _BeginsWhole(keras.callbacks.Callback):
    """Removes the piece of a row with which a full disk, or a kill, has ended a file that is to be continued."""

    def __init__(self, logger: keras.callbacks.CSVLogger) -> None:
        super().__init__()
        self._logger = logger

    def on_train_begin(self, logs: Any = None) -> None:
        path = self._logger.filename
        if self._logger.append and is_local(path) and os.path.isfile(path):
            with open(path, "rb+") as file:
                _cut_unfinished_line(file)


def _cut_unfinished_line(file: BinaryIO, block: int = 4096) -> None:
    """Cuts off what follows the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
