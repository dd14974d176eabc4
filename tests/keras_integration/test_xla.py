"""`jit_compile=True`: what XLA gets to compile, and what is said of the rest."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

XLA_PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf, tfrep_strategy as tfrep
strategy = tfrep.MirroredStrategy(tfrep.use_logical_cpus(2))
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=sys.argv[1] == "True")
model.fit(np.ones((32, 4)), np.ones((32, 1)), verbose=0)
"""


@pytest.mark.parametrize("jit_compile", [True, False])
def test_xla_compiles_what_lies_between_collectives(jit_compile: bool, tmp_path: pathlib.Path) -> None:
    environ = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    subprocess.run([sys.executable, "-c", XLA_PROGRAM, str(jit_compile)], env=environ, check=True, timeout=120)
    assert bool(list(tmp_path.glob("*cluster*"))) == jit_compile


class Halved(keras.layers.Layer):
    """Halves its input in Python, which XLA cannot compile."""

    def call(self, x: Any) -> Any:
        half = tf.numpy_function(lambda v: v / np.float32(2), [x], tf.float32)
        half.set_shape(x.shape)
        return half


def _trained(strategy: Any, jit_compile: bool) -> list[np.ndarray]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones"), Halved()])
        model.layers[0].trainable = False
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        model.compile("sgd", "mse", jit_compile=jit_compile)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0)
    return model.get_weights()


def test_what_cannot_be_compiled_is_said_and_runs() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.warns(UserWarning, match="XLA cannot compile PyFunc") as told:
        found = _trained(strategy, True)
    assert len([w for w in told if "XLA" in str(w.message)]) == 1
    for value, expected in zip(found, _trained(strategy, False), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
