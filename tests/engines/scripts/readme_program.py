"""The README's program with `MultiWorkerStrategy`, or with no strategy: `readme_program.py [COMMUNICATOR]`. Prints its weights."""

import contextlib
import json
import os
import sys

import keras

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

keras.utils.set_random_seed(0)
(x, y), test = load_digits()
strategy = tfrep.MultiWorkerStrategy(sys.argv[1]) if sys.argv[1:] else None
with strategy.scope() if strategy else contextlib.nullcontext():
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=64, epochs=2, validation_data=test, verbose=0).history
found = {"weights": [float(value) for weight in model.get_weights() for value in weight.ravel()], "history": history}
if strategy:
    communicator = strategy.communicator
    found["own"] = [communicator.rank, communicator.size, communicator.local_rank, communicator.local_size]
    told = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    found["told"] = [int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in told]
print("FOUND " + json.dumps(found))
