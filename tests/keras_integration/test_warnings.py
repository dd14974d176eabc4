"""A warning names a line of the user's program: one of Keras the line that plain Keras names, and none a line of this package."""

from __future__ import annotations

import json
import linecache
import subprocess
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from calling import command

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("callbacks")

X = np.ones((4, 2), "float32")


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return X, X[:, :1]


def _warns(whose: str, folder: str) -> None:
    if whose == "ours":
        scope = tfrep.MirroredStrategy(tfrep.use_logical_cpus(2)).scope()
    else:
        scope = tf.distribute.get_strategy().scope()
    data = tf.data.Dataset.from_tensors((X, X[:, :1]))
    with scope, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True, jit_compile=True)
        model.compile("sgd", "mse")
        model.fit(data, shuffle=True, class_weight=None, verbose=0)
        model.fit(data, steps_per_epoch=2, verbose=0)
        model.fit(Sequence(), verbose=0)
        model.evaluate(data, steps=2, verbose=0)
        model.save(folder + "/model.h5")
        keras.layers.Dense(1, input_shape=(2,))
        keras.layers.Embedding(2, 2, input_length=3)
        keras.Sequential([keras.layers.LSTM(1, dropout=0.1, use_cudnn=False)])
    print(json.dumps([[str(w.message)[:40], w.filename, w.lineno] for w in caught if w.category is UserWarning]))


def test_warnings_blame_the_line_that_keras_blames(tmp_path: Path) -> None:
    commands = [command(_warns, whose, str(tmp_path)) for whose in ("plain", "ours")]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    (plain, _), (ours, errors) = (process.communicate(timeout=120) for process in running)
    assert running[1].returncode == 0, errors
    assert "shuffle=True" in plain
    assert plain.count("[") > 4
    assert ours == plain


class MixedInALoop(keras.Sequential):
    def train_step(self, batch: Any) -> Any:
        x, y = batch
        mixed = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, 0.8 * v + 0.2 * tf.reverse(v, [0])), (0, x))[1]
        return super().train_step((mixed, y))


def test_warnings_of_this_package_name_the_line_that_calls_fit() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = MixedInALoop([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="cannot be split among replicas") as told:
        model.fit(X, X[:, :1], verbose=0)
    (warning,) = [each for each in told if "cannot be split among replicas" in str(each.message)]
    assert warning.filename == __file__
    assert "model.fit" in linecache.getline(warning.filename, warning.lineno)
