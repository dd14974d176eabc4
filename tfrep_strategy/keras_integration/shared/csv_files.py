"""Rows of a `CSVLogger` are whole: a run that goes on begins after the last whole one, and after the last of its backup."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
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


def lengths_of(callbacks: Iterable[Any]) -> dict[str, int]:
    """Returns how long the files of `CSVLogger`s are, by their paths; those of this machine, while they are open."""
    return {logger.filename: os.path.getsize(logger.filename) for logger in _with_files(callbacks)}


def cut_to(lengths: Mapping[str, int], callbacks: Iterable[Any]) -> None:
    """Removes rows that were written later, from files that are open to be continued.

    Args:
        lengths: From `lengths_of`.
        callbacks: Those of a `fit` that goes on.
    """
    for logger in _with_files(callbacks):
        length = lengths.get(logger.filename)
        if length is not None and length < os.path.getsize(logger.filename):
            os.truncate(logger.filename, length)
            logger.append_header = length == 0


def _with_files(callbacks: Iterable[Any]) -> list[keras.callbacks.CSVLogger]:
    loggers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]
    return [logger for logger in loggers if is_local(logger.filename) and os.path.isfile(logger.filename)]


class _BeginsWhole(keras.callbacks.Callback):
    """Removes the piece of a row with which a full disk, or a kill, has ended a file that is to be continued."""

    def __init__(self, logger: keras.callbacks.CSVLogger) -> None:
        super().__init__()
        self._logger = logger

    def on_train_begin(self, logs: Any = None) -> None:
        if self._logger.append and _with_files([self._logger]):
            with open(self._logger.filename, "rb+") as file:
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
