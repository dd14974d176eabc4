"""Trains a model whose weights are in parts on four devices, for `tfrep verify`."""

import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices

import tfrep_strategy as tfrep

parts = sys.argv[1]
keras.utils.set_random_seed(1)
if "x" in parts:
    layouts = LayoutMap(DeviceMesh(tuple(map(int, parts.split("x"))), ["batch", "model"], list_devices()))
    layouts[".*into/kernel"], layouts[".*into/bias"], layouts[".*out/kernel"] = ("batch", "model"), ("model",), ("model", None)
    scope = ModelParallel(layout_map=layouts, batch_dim_name="batch").scope()
elif len(tf.config.list_logical_devices()) == 1:
    scope = contextlib.nullcontext()
else:
    scope = tfrep.MirroredStrategy(shard_optimizer_state=True, shard_weights=True, shard_weights_min_bytes=1).scope()

with scope:
    layers = keras.layers
    hidden = [layers.Dense(16, "relu", name="into"), layers.Dense(8, name="out"), layers.Dropout(0.2)]
    model = keras.Sequential([*hidden, layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(37, 8)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
