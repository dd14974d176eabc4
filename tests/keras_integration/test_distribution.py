"""`keras.distribution` on the TensorFlow backend, used as Keras's guide uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices, set_distribution
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.rendezvous.connections import free_ports

_X = np.random.default_rng(0).normal(size=(37, 4)).astype("float32")
_LIMIT = 120


@pytest.fixture(autouse=True)
def _leaves_no_distribution() -> Iterator[None]:
    tfrep.enable_keras_distribution()
    yield
    set_distribution(None)
    assert not tf.distribute.has_strategy()


def _trained() -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    history = model.fit(_X, _X[:, :1], batch_size=8, epochs=2, verbose=0).history
    return history | {"weights": model.get_weights(), "predicted": model.predict(_X, verbose=0)}


def _check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), found, expected)


@pytest.mark.lane("quick")
def test_devices_of_this_process() -> None:
    assert list_devices() == list_devices("CPU") == [f"cpu:{i}" for i in range(4)]
    assert keras.distribution.get_device_count() == 4
    assert list_devices("gpu") == []


@pytest.mark.parametrize("devices", [None, ["cpu:1", "cpu:3"]])
def test_data_parallel(devices: list[str] | None) -> None:
    expected = _trained()
    distribution = DataParallel(devices=devices)
    set_distribution(distribution)
    assert keras.distribution.distribution() is distribution
    assert tf.distribute.get_strategy().num_replicas_in_sync == len(devices or list_devices())
    _check_equal(_trained(), expected)


def test_a_model_outlives_its_distribution() -> None:
    with DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(_X, _X[:, :1], verbose=0)
    assert not tf.distribute.has_strategy()
    with DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        model.fit(_X, _X[:, :1], verbose=0)
    assert model.predict(_X, verbose=0).shape == (37, 1)


@pytest.mark.lane("quick")
def test_a_lone_device_needs_no_strategy() -> None:
    set_distribution(DataParallel(devices=["cpu:0"]))
    assert not tf.distribute.has_strategy()


@pytest.mark.lane("quick")
def test_in_a_scope_the_mesh_has_its_replicas() -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert list_devices() == ["cpu:0", "cpu:1"]
        set_distribution(DataParallel())
        with refuses(devices=["cpu:0", "cpu:1", "cpu:2"], replicas=2, hint="list_devices()"):
            set_distribution(DataParallel(devices=["cpu:0", "cpu:1", "cpu:2"]))
        set_distribution(None)


@pytest.mark.lane("quick")
def test_layouts_of_weights_are_refused() -> None:
    mesh = DeviceMesh((2, 2), ["batch", "model"])
    with refuses(distribution="ModelParallel", hint="DataParallel"):
        set_distribution(ModelParallel(layout_map=LayoutMap(mesh)))


@pytest.mark.lane("quick")
def test_devices_that_are_not_there() -> None:
    with refuses(code="TFREP-E010", hint="this process has CPU:0", devices=["CPU:0", "CPU:9"]):
        set_distribution(DataParallel(devices=["cpu:0", "cpu:9"]))


_PROGRAM = """
import sys
import keras, numpy as np
import tfrep_strategy as tfrep
tfrep.enable_keras_distribution()
if len(sys.argv) > 1:
    keras.distribution.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
else:
    keras.distribution.initialize()
assert keras.distribution.list_devices("cpu") == ["cpu:0", "cpu:1"]
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(37, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
print(model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"])
"""


@pytest.mark.parametrize("start", ["initialize", "tfrep run"])
def test_two_processes(start: str, tmp_path: Path) -> None:
    expected = _trained()["loss"]
    script = tmp_path / "script.py"
    script.write_text(_PROGRAM)
    if start == "tfrep run":
        commands = [[sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", str(script)]]
    else:
        (port,) = free_ports(1, "")
        commands = [[sys.executable, "-W", "error::UserWarning", str(script), f"localhost:{port}", str(i)] for i in range(2)]
    environ = inherited_environ() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        for each in processes:
            out, errors = each.communicate(timeout=_LIMIT)
            assert each.returncode == 0, errors
            np.testing.assert_allclose(eval(out.splitlines()[-1]), expected, rtol=2e-6)
    finally:
        for each in processes:
            each.kill()


@pytest.mark.lane("quick")
def test_initialize_beside_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    keras.distribution.initialize()
    keras.distribution.initialize(num_processes=2, process_id=1)
    with refuses(num_processes=3, hint="without arguments"):
        keras.distribution.initialize(num_processes=3)


@pytest.mark.lane("quick")
def test_a_process_id_that_is_too_large_changes_nothing() -> None:
    before = dict(os.environ)
    with refuses(told=["keras.distribution"]):
        keras.distribution.initialize("a:1", num_processes=2, process_id=5)
    assert dict(os.environ) == before
