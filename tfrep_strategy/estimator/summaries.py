"""Summaries for TensorBoard, which the chief writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfrep_strategy.strategies.of_process import is_chief_process


class Summaries:
    """Writes numbers into a folder, on the chief, if the package `tensorboard` is there.

    Args:
        writer: TensorFlow's writer; None: nothing is written.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a global step, by name."""
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    tf.summary.scalar(name, value, step=step)


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
