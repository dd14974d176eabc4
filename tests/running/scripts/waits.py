"""Trains a step on each rank, says so in a folder, and waits until the folder has a file `go`: `waits.py FOLDER [HOW]`.

How: "launch" two ranks, be a "launcher" that knows nothing of this package, or train on a "cluster" that this process starts.
"""

import os
import subprocess
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


def start_two_ranks(folder: Path) -> None:
    """Starts them as torchrun does."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = [os.environ | place | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    command = [sys.executable, __file__, str(folder), "rank"]
    if any([rank.wait() for rank in [subprocess.Popen(command, env=environ) for environ in ranks]]):
        sys.exit(1)


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), "".join(sys.argv[2:])
    if how == "launch":
        tfrep.launch(train_and_wait, (folder,), num_replicas=2, communicator="tf")
    elif how == "launcher":
        start_two_ranks(folder)
    elif how == "rank":
        with tfrep.MultiWorkerStrategy().scope():
            train_and_wait(folder)
    elif how == "cluster":
        with tfrep.local_cluster(workers=1, servers=1) as cluster, tfrep.ParameterServerStrategy(cluster).scope():
            train_and_wait(folder)
    else:
        train_and_wait(folder)
