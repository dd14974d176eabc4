"""A program of one rank, run as a script: it trains, and on the way a rank ends in some way.

`python peer_programs.py COMMUNICATOR WAY RANK FOLDER`: rank RANK ends in the way WAY. Each rank leaves in FOLDER the
time of the end (`end`), what it caught (`caught<rank>`), and `done<rank>` when it has come to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import PeerError

LATE_SECONDS = 3.0
HANG_SECONDS = 20.0
GROUP_SECONDS = 12.0


def end(way: str, folder: Path) -> None:
    """Ends this process."""
    (folder / "end").write_text(str(time.time()))
    if way == "hang":
        time.sleep(HANG_SECONDS)
    elif way == "raise":
        raise ValueError("the data are spoiled")
    elif way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "exit":
        os._exit(0)
    elif way == "leave":
        sys.exit(0)
    elif way == "forked" and not os.fork():  # A child that outlives its parent keeps every descriptor open.
        while (folder / "end").exists():
            time.sleep(0.1)
        os._exit(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class EndInEpoch(keras.callbacks.Callback):
    def __init__(self, way: str, folder: Path) -> None:
        super().__init__()
        self.way, self.folder, self.batches = way, folder, 0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.batches += 1
        if self.batches == 6:
            end(self.way, self.folder)


def train(strategy: tf.distribute.Strategy, callbacks: list[keras.callbacks.Callback]) -> None:
    x = np.random.RandomState(0).randn(64, 4).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=callbacks)


def loop(strategy: tf.distribute.Strategy, ends: bool, way: str, folder: Path) -> None:
    """A loop of one's own, of steps in a `tf.function` and of eager ones."""
    step = tf.function(lambda: strategy.run(lambda: tfrep.all_reduce(tf.ones([3]))))
    for number in range(100):
        if ends and number == 6:
            end(way, folder)
        step() if number % 2 else strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))


def sum_in_group(strategy: tf.distribute.Strategy, ends: bool) -> None:
    """Ranks 0 and 1 sum without the rank that ends; rank 1 comes long after its end."""
    group = strategy.new_group([0, 1])
    if ends:
        return
    if strategy.rank == 1:
        time.sleep(GROUP_SECONDS)
    for _ in range(2):
        assert strategy.run(lambda: tfrep.all_sum(1.0, group=group)) == 2.0


def main(communicator: str, way: str, rank: int, folder: Path) -> None:
    strategy = tfrep.MultiWorkerStrategy(communicator)
    ends = strategy.rank == rank
    way, _, kind = way.partition("-")
    try:
        if kind == "group":
            sum_in_group(strategy, ends)
        elif kind == "loop":
            loop(strategy, ends, way, folder)
        elif kind == "stuck":
            while ends and not (folder / "stuck").exists():
                time.sleep(0.05)
            if ends:
                end(way, folder)
            with strategy.communicator.monitor.watching(range(strategy.num_replicas_in_sync)):
                (folder / "stuck").touch()
                time.sleep(600.0)
        else:
            train(strategy, [EndInEpoch(way, folder)] if ends and way != "late" else [])
    except (tf.errors.OpError, PeerError) as error:
        name = "UnavailableError" if isinstance(error, tf.errors.UnavailableError) else type(error).__name__
        (folder / f"caught{strategy.rank}").write_text(f"{name}: {error}")
        raise
    if way == "late" and ends:
        time.sleep(LATE_SECONDS)
    (folder / f"done{strategy.rank}").write_text("")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
