"""Trains with layouts on a mesh of four devices, for `tfrep verify`."""

import sys

import keras
import numpy as np
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices, set_distribution

batch, split = map(int, sys.argv[1].split("x"))
keras.utils.set_random_seed(1)
layouts = LayoutMap(DeviceMesh((batch, split), ["batch", "model"], list_devices()))
layouts[".*into/kernel"], layouts[".*into/bias"], layouts[".*out/kernel"] = ("batch", "model"), ("model",), ("model", None)
set_distribution(ModelParallel(layout_map=layouts, batch_dim_name="batch"))

layers = keras.layers
model = keras.Sequential([layers.Dense(16, "relu", name="into"), layers.Dense(8, name="out"), layers.Dropout(0.2), layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(37, 8)).astype("float32")
model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
