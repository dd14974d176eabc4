"""Trains with a backup, and says at the end of each epoch that it is there."""

import keras
import numpy as np

rng = np.random.RandomState(0)
x = rng.randn(1000, 4).astype("float32")
y = (x @ rng.randn(4, 1)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
model.fit(x, y, batch_size=10, epochs=15, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup"), tell])
print(type(model.distribute_strategy).__name__, int(model.optimizer.iterations), model.evaluate(x, y, verbose=0) < 0.1)
