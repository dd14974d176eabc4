"""The program of `benchmarks.traffic`: trains a net, and counts what its steps send."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfrep_strategy as tfrep
from benchmarks.step import NETS
from benchmarks.step_worker import make_model
from tfrep_strategy.communicators.shared_memory import memory
from tfrep_strategy.communicators.shared_memory.links import Links
from tfrep_strategy.transports import wanted_communicator

_TRACED_STEPS, _FEW_STEPS, _MANY_STEPS = 12, 4, 24


def main() -> None:
    """Trains. Rank 0 writes what was counted to a folder; the command line names it, the net, and the strategy's settings."""
    folder, name, settings = sys.argv[1:]
    net = NETS[name]
    sent = _bytes_in_memory() if memory_is_used() else lambda: psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    strategy = tfrep.MultiWorkerStrategy(**json.loads(settings))
    with strategy.scope():
        model = make_model(keras, net["widths"], net.get("filters", ()))
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)

    def bytes_of(steps: int) -> int:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((steps * net["batch"], net["widths"][0]), np.float32)
        y = rng.integers(net["widths"][-1], size=len(x))
        strategy.communicator.barrier()
        before = sent()
        model.fit(x, y, batch_size=net["batch"], verbose=0)
        strategy.communicator.barrier()
        return sent() - before

    bytes_of(_TRACED_STEPS)
    few, many = bytes_of(_FEW_STEPS), bytes_of(_MANY_STEPS)  # What an epoch sends beside its steps, both send.
    strategy.assert_in_sync(model)
    if memory_is_used():  # Each rank has counted its own.
        few, many = (int(total) for total in strategy.communicator.all_reduce([tf.constant(few), tf.constant(many)]))
    if tfrep.is_chief():
        steps = int(model.optimizer.iterations)
        bucket = strategy.extended.bucket_bytes_for(model.trainable_variables)
        counted = {"bytes": (many - few) / (_MANY_STEPS - _FEW_STEPS), "bucket_bytes": bucket, "steps": steps}
        Path(folder, "counted.json").write_text(json.dumps(counted), "utf-8")


def memory_is_used() -> bool:
    """Returns whether the ranks talk through common memory."""
    return wanted_communicator() == "shared_memory"


def _bytes_in_memory() -> Callable[[], int]:
    """Begins to count what this process writes to common memory, and to the sockets beside it. Returns a function that tells it."""
    written = 0
    read, reduce_in_order, exchange = memory.Row.read, memory.reduce_in_order, Links.exchange

    def counted_read(row: memory.Row, start: int, into: np.ndarray) -> None:
        nonlocal written
        written += min(row.size - start, len(into)) * into.itemsize
        read(row, start, into)

    def counted_reduction(parts: Any, op: str, out: np.ndarray) -> None:
        nonlocal written
        written += out.nbytes
        reduce_in_order(parts, op, out)

    def counted_exchange(links: Links, message: bytes = b"") -> list[bytes]:
        nonlocal written
        written += (1 + len(message)) * (links.size - 1)
        return exchange(links, message)

    mock.patch.object(memory.Row, "read", counted_read).start()
    mock.patch.object(memory, "reduce_in_order", counted_reduction).start()
    mock.patch.object(Links, "exchange", counted_exchange).start()
    return lambda: written


if __name__ == "__main__":
    main()
