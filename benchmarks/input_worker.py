"""One process of `benchmarks.input`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.crews import work


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Sets a process up.

    Args:
        settings: "distributed": whether there are several processes.

    Returns:
        A function that reads one epoch and returns the CPU seconds of all processes.
    """
    import tfrep_strategy as tfrep

    strategy = tfrep.MultiWorkerStrategy("tf") if settings["distributed"] else None
    read: dict[str, Any] = {}

    def measure(question: dict[str, Any]) -> float:
        folder = question["folder"]
        if folder not in read:
            read[folder] = pipeline(folder) if strategy is None else strategy.experimental_distribute_dataset(pipeline(folder))
        start = time.process_time()
        for _ in read[folder]:
            pass
        seconds = time.process_time() - start
        return seconds if strategy is None else sum(strategy.extended.all_gather_object(seconds))

    return measure


def pipeline(folder: str) -> tf.data.Dataset:
    """The pipeline of the guides: files in another order in each epoch, decoded and resized in parallel, in batches."""

    def decode(name: tf.Tensor) -> tf.Tensor:
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(name), 3), (160, 160))

    files = tf.data.Dataset.list_files(f"{folder}/*.jpg", seed=1)
    return files.map(decode, tf.data.AUTOTUNE).batch(64).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    main()
