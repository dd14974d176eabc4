"""Rank 1 runs out of memory where it gathers a sharded weight: `too_little_memory.py FOLDER`. Each rank writes its error there."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import tfrep_strategy as tfrep

_WIDTH, _LEFT = 4096, 40 << 20
"""A gathered layer takes 64 MB, more than the rank has left."""


class Limits(keras.callbacks.Callback):
    """Takes memory away from rank 1 in the second epoch, between two steps."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, 1):
            self.began = time.monotonic()
            if strategy.rank == 1:
                unlimited = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _LEFT, unlimited))


folder = Path(sys.argv[1])
strategy = tfrep.MultiWorkerStrategy(shard_optimizer_state=True, shard_weights=True)
with strategy.scope():
    layers = [keras.layers.Dense(_WIDTH, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
    model.compile("sgd", "mse")
x, limits = np.ones((24, _WIDTH), "float32"), Limits()
try:
    model.fit(
        x, x, batch_size=8, epochs=5, verbose=0, callbacks=[limits, tfrep.callbacks.ShardedCheckpoint(folder / "checkpoints")]
    )
except BaseException as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    told = f"{time.monotonic() - limits.began:.1f}\n{type(error).__name__}: {error}"
    (folder / f"error-{strategy.rank}.txt").write_text(told, "utf-8")
    raise
