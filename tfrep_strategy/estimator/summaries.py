"""Summaries for TensorBoard, which the chief writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.strategies.of_process import is_chief_process


class Summaries:
    """Writes numbers into a folder, on the chief, if the package `tensorboard` is there.

    Args:
        writer: TensorFlow's writer; None: nothing is written.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes numbers of a global step, by name; those of an array by its name and their places."""
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    for place, number in np.ndenumerate(value):
                        tf.summary.scalar("_".join([name, *map(str, place)]), number, step=step)


def plain(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns results of metrics as numbers, and as arrays where they have several."""
    arrays = {name: np.asarray(value) for name, value in results.items()}
    return {name: array if array.ndim else float(array) for name, array in arrays.items()}


@contextmanager
def summaries_in(folder: str) -> Iterator[Summaries]:
    """Yields the summaries of a folder, and closes its file afterwards."""
    if not is_chief_process() or importlib.util.find_spec("tensorboard") is None:
        yield Summaries(None)
        return
    writer = tf.summary.create_file_writer(folder)
    try:
        yield Summaries(writer)
    finally:
        writer.close()
