"""Trains on the digits, on two replicas."""

import keras

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

strategy = tfrep.MirroredStrategy(tfrep.use_logical_cpus(2))
(x, y), _ = load_digits()
with strategy.scope():
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
losses = model.fit(x[:256], y[:256], epochs=2, verbose=0).history["loss"]
print(strategy.num_replicas_in_sync, losses[1] < losses[0])
