"""Trains a step on each rank, says so in a folder, and waits until the folder has a file `go`: `waits.py FOLDER [launch]`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfrep_strategy as tfrep


def train_and_wait(folder: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    (folder / f"ready{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[2:] == ["launch"]:
        tfrep.launch(train_and_wait, (Path(sys.argv[1]),), num_replicas=2, communicator="tf")
    else:
        train_and_wait(Path(sys.argv[1]))
