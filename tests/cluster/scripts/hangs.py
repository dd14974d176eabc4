"""A program in which rank 1 hangs: `hangs.py KIND FOLDER`. Ranks sum in a `tf.function`, or, for `KIND-eager`, eagerly."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import tensorflow as tf

import tfrep_strategy as tfrep

STEPS = 5
SECONDS = 30.0


def think() -> None:
    time.sleep(SECONDS)


def read(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with open(folder / "pipe") as pipe:  # No process writes to it.
        pipe.read()


def stop() -> None:
    (sign,) = (Path(file.path) for file in psutil.Process().open_files() if file.path.endswith(".life"))
    while f"{__file__}:" not in (told := sign.read_text("utf-8")) or " in stop" not in told:
        time.sleep(0.05)  # The last sign of life shall say where the rank is stopped.
    os.kill(os.getpid(), signal.SIGSTOP)


def main(kind: str, folder: Path) -> None:
    kind, _, eager = kind.partition("-")
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tfrep.MultiWorkerStrategy):
        strategy = tfrep.MultiWorkerStrategy(os.environ.get("TFREP_COMMUNICATOR", "tf"))

    @tf.function
    def step() -> tf.Tensor:
        return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))

    @tf.function
    def end() -> tf.Tensor:
        return strategy.run(lambda: tfrep.all_reduce(tf.ones([3]), "max"))

    for function in (step, end):
        function()
    hangs = strategy.rank == 1
    for number in range(STEPS):
        if hangs and number == STEPS - 1:
            if kind == "python":
                think()
            elif kind == "io":
                read(folder)
            elif kind == "stop":
                stop()
        if kind == "order" and number == STEPS - 1:
            (end if hangs else step)()
        if eager:
            strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))  # Eagerly.
        else:
            step()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
