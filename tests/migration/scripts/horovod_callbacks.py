"""Tries each callback of Horovod's Keras front end in a `fit` of its own, and prints what came of it, by name."""

import json

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
callbacks = {
    "BroadcastGlobalVariablesCallback": lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    "MetricAverageCallback": lambda: hvd.callbacks.MetricAverageCallback(),
    "LearningRateWarmupCallback": lambda: hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1),
    "LearningRateScheduleCallback": lambda: hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5),
    "BestModelCheckpoint": lambda: hvd.callbacks.BestModelCheckpoint(),
}
found = {}
for name, make in callbacks.items():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[make()], verbose=0)
        found[name] = "trained"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"found": found}))
