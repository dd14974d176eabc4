"""`jit_compile=True`: what XLA gets to compile, and what is said of the rest."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from calling import command

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.xla import compiled_between_collectives


def _fit_or_predict(devices: str, jit_compile: str, method: str) -> None:
    strategy = tfrep.MirroredStrategy(tfrep.use_logical_cpus(int(devices)))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=jit_compile == "True")
    if method == "fit":
        model.fit(np.ones((32, 4)), np.ones((32, 1)), verbose=0)
    else:
        model.predict(np.ones((32, 4)), verbose=0)


@pytest.mark.parametrize(
    ("devices", "jit_compile", "method", "compiled"),
    [
        (2, True, "fit", "cluster"),  # What lies between collectives.
        (2, True, "predict", "cluster"),
        (2, False, "fit", ""),
        (1, True, "fit", "one_step_on_data"),  # The whole step: there is nobody to talk to.
    ],
)
def test_what_xla_compiles(devices: int, jit_compile: bool, method: str, compiled: str, tmp_path: pathlib.Path) -> None:
    environ = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    arguments = [str(devices), str(jit_compile), method]
    subprocess.run(command(_fit_or_predict, *arguments), env=environ, check=True, timeout=120)
    kinds = ("cluster", "one_step_on_data")
    found = [kind for kind in kinds if any(kind in path.name for path in tmp_path.iterdir())]
    assert found == ([compiled] if compiled else [])


class NotCompiled(keras.layers.Layer):
    """A layer that says that XLA cannot compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.lane("quick")
@pytest.mark.parametrize("layer", [keras.layers.ReLU, NotCompiled])
def test_auto_is_what_it_is_on_one_device(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    physical = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda device_type=None: physical)
    for name, strategy in {
        "one device": contextlib.nullcontext(),
        "mirrored": tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope(),
        "process": tfrep.MultiWorkerStrategy().scope(),
    }.items():
        with strategy:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), layer()])
            model.compile("sgd", "mse")
        found[name] = model.jit_compile
    assert found == dict.fromkeys(found, layer is keras.layers.ReLU)


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


@pytest.mark.lane("quick")
def test_what_cannot_be_compiled_is_said_and_runs() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.warns(UserWarning, match="XLA cannot compile PyFunc") as told:
        found = _trained(strategy, True)
    assert len([w for w in told if "XLA" in str(w.message)]) == 1
    for value, expected in zip(found, _trained(strategy, False), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def _warnings_of_xla(strategy: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    return [str(each.message) for each in told if "XLA" in str(each.message)]


def test_collectives_are_not_meant_for_xla(worker_pool: Any) -> None:
    assert worker_pool("shared_memory", 2).run(_warnings_of_xla) == [[], []]


@pytest.mark.lane("quick")
def test_what_is_marked_for_xla() -> None:
    """Replicas build one graph in turns: both are marked, what they say to each other is not, nor what comes after."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.square(tfrep.all_sum(tf.sin(x)), name="squared")

    @tf.function
    def run() -> Any:
        squares = strategy.run(compiled_between_collectives(step), (tf.constant(1.0),))
        return tf.add_n(strategy.experimental_local_results(squares), name="after")

    def marks(kind: str) -> list[bool | None]:
        found = [op for op in run.get_concrete_function().graph.get_operations() if op.type == kind]
        return [op.node_def.attr["_XlaCompile"].b if "_XlaCompile" in op.node_def.attr else None for op in found]

    assert marks("Sin") == marks("Square") == [True, True]
    assert sorted(marks("AddN"), key=str) == [False, None]
    np.testing.assert_allclose(run(), 2 * (2 * np.sin(1)) ** 2, rtol=1e-6)


def _of_all_rows() -> tuple[list[float], list[np.ndarray]]:
    """The loss is of the rows of all replicas, and a layer has the gradient of `tf.pad`: a slice at a place that is no constant."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "sigmoid"), Padded()])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.Dice(axis=None), jit_compile=True)
    x = np.random.default_rng(1).standard_normal((18, 4), "float32")
    history = model.fit(x, (x[:, :3] > 0).astype("float32"), batch_size=9, epochs=2, shuffle=False, verbose=0).history
    return history["loss"], model.get_weights()


class Padded(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        count = tf.shape(x)[0]
        return tf.pad(x, [[0, count], [0, 0]])[:count]


def _of_all_rows_on_ranks(strategy: Any) -> tuple[list[float], list[np.ndarray]]:
    with strategy.scope():
        return _of_all_rows()


@pytest.mark.timeout(200)
def test_slices_on_two_processes(worker_pool: Callable[[str, int], Any]) -> None:
    expected_losses, expected = _of_all_rows()
    for losses, weights in worker_pool("tf", 2).run(_of_all_rows_on_ranks):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        for value, wanted in zip(weights, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


class MixedInALoop(keras.Sequential):
    """Nobody can repeat what comes after rows that a loop has mixed, so each process runs the step with all rows."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        mixed = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, 0.8 * v + 0.2 * tf.reverse(v, [0])), (0, x))[1]
        return super().train_step((mixed, y))


def _with_dropout_of_all_rows() -> tuple[list[float], list[np.ndarray]]:
    """The last batch has a shape of its own, which comes once. XLA on CPUs draws other numbers than TensorFlow."""
    keras.utils.set_random_seed(1)
    model = MixedInALoop([keras.Input((4,)), keras.layers.Dropout(0.4, seed=2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    x = np.random.default_rng(1).standard_normal((13, 4), "float32")
    history = model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0).history
    return history["loss"], model.get_weights()


def _with_dropout_of_all_rows_on_ranks(strategy: Any) -> tuple[list[float], list[np.ndarray]]:
    with strategy.scope():
        return _with_dropout_of_all_rows()


def test_steps_that_run_with_all_rows_are_compiled(worker_pool: Any) -> None:
    expected_losses, expected_weights = _with_dropout_of_all_rows()
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        found = [_with_dropout_of_all_rows()]
    for losses, weights in found + worker_pool("tf", 2).run(_with_dropout_of_all_rows_on_ranks):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        for value, expected in zip(weights, expected_weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
