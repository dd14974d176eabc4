"""README's program, with code outside of all scopes around it. What it shows at the end has to be the same on all ranks."""

import json
import os
import sys

import keras
import numpy as np

import tfrep_strategy as tfrep

keras.utils.set_random_seed(0)
chief = tfrep.is_chief()
strategy = tfrep.MultiWorkerStrategy()
assert chief == tfrep.is_chief() == (strategy.rank == 0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(40, dtype="float32").reshape(10, 4) / 40
history = model.fit(x, x[:, :1], batch_size=4, verbose=0).history
with tfrep.chief_first():
    if chief:
        os.mkdir("out")
    assert os.path.isdir("out")
try:
    with tfrep.chief_first():
        os.mkdir("out")
except Exception as error:
    failure = type(error).__name__
if not chief:
    open("from_rank_1", "w").close()
tfrep.barrier()
assert os.path.exists("from_rank_1")
found = {
    "failure": failure,
    "size": strategy.num_replicas_in_sync,
    "ranks": tfrep.all_gather_object(strategy.rank),
    "communicator": strategy.communicator.name,
    "loss": history["loss"],
    "argv": sys.argv[1:],
}
if os.environ.get("PYTHONHASHSEED", "random") != "random":
    found["hash"] = hash("word")
print("FOUND " + json.dumps(found), flush=True)
