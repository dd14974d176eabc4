"""Writes what each rank knows of its process into FOLDER; with "kill", rank 1 is lost in the first start."""

import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from pathlib import Path

import tensorflow as tf

import tfrep_strategy as tfrep


class Thing:
    pass


def square(number: int) -> int:
    return number * number


if __name__ == "__main__":
    folder, what = Path(sys.argv[1]), sys.argv[2]
    rank, restarts = tfrep.MultiWorkerStrategy().rank, os.environ["TFREP_RESTARTS"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tf.config.threading.set_inter_op_parallelism_threads(3)
    facts = {
        "argv": sys.argv[2:],
        "path": sys.path[0],
        "main": [__name__, Path(__file__).name, sys.modules["__main__"].square is square],
        "pickled": pickle.loads(pickle.dumps(Thing())).__class__.__module__,
        "squares": squares,
        "environ": {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "TFREP_BACKUP_DIR")},
        "folder": os.getcwd(),
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("Thread-")),
        "input": None if rank else sys.stdin.read(),
        "late": len(caught),
        "ranks": tfrep.all_gather_object(rank),
        "handlers": {each.name: str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
    }
    Path(folder, f"{rank}-{restarts}.json").write_text(json.dumps({"facts": facts, "parent": os.getppid()}), "utf-8")
    if what == "kill" and rank and restarts == "0":
        os.kill(os.getpid(), signal.SIGKILL)
