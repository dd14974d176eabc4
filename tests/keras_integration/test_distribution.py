"""`keras.distribution` on the TensorFlow backend, used as Keras's guide uses it."""

from __future__ import annotations

import itertools
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
from lanes import in_lane
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
def test_devices_that_are_not_there() -> None:
    with refuses(code="TFREP-E010", hint="this process has CPU:0", devices=["CPU:0", "CPU:9"]):
        set_distribution(DataParallel(devices=["cpu:0", "cpu:9"]))


def _block(width: int = 16) -> keras.Model:
    layers = keras.layers
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(16, 8, name="words")(words)
    x = x + layers.MultiHeadAttention(4, 4, name="heads")(x, x)
    x = layers.LayerNormalization()(x)
    x = x + layers.Dense(8, name="out")(layers.Dense(width, "gelu", name="into")(x))
    x = layers.Dropout(0.2, seed=1)(x)
    return keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def _layouts(mesh: DeviceMesh) -> LayoutMap:
    found = LayoutMap(mesh)
    found["words/embeddings"] = ("model", "batch")
    found["heads/(query|key|value)/kernel"] = (None, "model", None)
    found["heads/(query|key|value)/bias"] = ("model", None)
    found["heads/attention_output/kernel"] = ("model", None, None)
    found["into/kernel"], found["into/bias"], found["out/kernel"] = ("batch", "model"), ("model",), ("model", "batch")
    return found


def _model_parallel(batch: int, model: int) -> ModelParallel:
    mesh = DeviceMesh((batch, model), ["batch", "model"], list_devices()[: batch * model])
    return ModelParallel(layout_map=_layouts(mesh), batch_dim_name="batch")


_OPTIMIZERS: dict[str, Any] = {
    "adam, clipped": lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    "sgd of slices": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "a global norm, accumulated": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=3),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=256.0),
}
_WORDS, _KINDS = np.random.default_rng(2).integers(0, 16, (37, 6)), np.random.default_rng(3).integers(0, 3, 37)


def _fitted(optimizer: str, **settings: Any) -> tuple[keras.Model, dict[str, Any]]:
    keras.utils.set_random_seed(1)
    model = _block()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], **settings)
    history = model.fit(_WORDS, _KINDS, batch_size=8, epochs=2, verbose=0, validation_split=0.2).history
    return model, history | {"weights": model.get_weights(), "predicted": model.predict(_WORDS, verbose=0)}


_QUICKEST = [((1, 2), "adam, clipped"), ((2, 2), "a global norm, accumulated")]
_OTHERS = [pair for pair in itertools.product([(1, 2), (1, 4), (2, 2)], _OPTIMIZERS) if pair not in _QUICKEST]


@pytest.mark.parametrize(("axes", "optimizer"), [*_QUICKEST, *in_lane("sharded_training", *_OTHERS)])
def test_model_parallel(axes: tuple[int, int], optimizer: str) -> None:
    _, expected = _fitted(optimizer)
    set_distribution(_model_parallel(*axes))
    model, found = _fitted(optimizer)
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, expected)
    kernel, (batch, split) = model.get_layer("into").kernel.value, axes
    assert [part.shape for part in kernel.values] == [(8 // batch, 16 // split)] * (batch * split)
    assert kernel.shape == (8, 16)


@pytest.mark.lane("sharded_training")
@pytest.mark.usefixtures("float64")
def test_weights_in_float64() -> None:
    """The bias of the keys has no gradient but rounding, of which Adam makes steps; that is all by which weights differ."""
    _, expected = _fitted("adam, clipped")
    set_distribution(_model_parallel(1, 4))
    _, found = _fitted("adam, clipped")
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10), found, expected)


def test_what_model_parallel_replicas_send() -> None:
    """Of a block's parts each is summed once, and no weight is sent."""
    set_distribution(_model_parallel(1, 2))
    model, _ = _fitted("sgd of slices")
    lines = str(tf.distribute.get_strategy().explain(model)).splitlines()
    rounds = [line for line in lines if line.startswith(("train: Round", "predict: Round"))]
    assert not any("gather" in line for line in rounds), rounds
    wide = "1 sum of 192 bytes a row"
    sums = {phase: sum(wide in line for line in rounds if line.startswith(phase)) for phase in ("train", "predict")}
    # Forward: the embedding, the heads, the wide layers, which predictions sum behind the pooling. Backward: the last two.
    assert sums == {"train": 5, "predict": 2}, rounds
    assert not any("192 bytes" in line.replace(wide, "") for line in rounds), rounds


def _of_images() -> tuple[keras.Model, dict[str, Any]]:
    keras.utils.set_random_seed(1)
    layers, images = keras.layers, keras.Input((8, 8, 3))
    y = layers.Conv2D(8, 3, padding="same", name="into")(images)
    y = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization(name="of_channels")(y)))
    y = layers.SpatialDropout2D(0.2, seed=2)(layers.UpSampling2D()(y))
    y = layers.Conv2D(4, 3, name="out", kernel_regularizer="l2")(layers.AveragePooling2D(2)(y))
    model = keras.Model(images, layers.Dense(2)(layers.GlobalAveragePooling2D()(y)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    draw = np.random.default_rng(5)
    x, y = draw.normal(size=(37, 8, 8, 3)), draw.normal(size=(37, 2))
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    return model, history | {"weights": model.get_weights(), "predicted": model.predict(x, verbose=0)}


@pytest.mark.lane("sharded_training")
@pytest.mark.usefixtures("float64")
def test_channels_of_convolutions() -> None:
    """What is computed for each channel stays split: as in a block of dense layers, the images are summed once forward."""
    _, expected = _of_images()
    mesh = DeviceMesh((1, 4), ["batch", "model"], list_devices())
    layouts = LayoutMap(mesh)
    layouts["into/kernel"] = (None, None, None, "model")
    layouts["(into/bias|of_channels/.*)"] = ("model",)
    layouts["out/kernel"] = (None, None, "model", None)
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    model, found = _of_images()
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10), found, expected)
    assert [part.shape for part in model.get_layer("into").kernel.value.values] == [(3, 3, 3, 2)] * 4
    told = str(tf.distribute.get_strategy().explain(model))
    assert "gather" not in told, told
    assert "equal rows" not in told, told


def test_steps_that_run_eagerly() -> None:
    _, expected = _fitted("adam, clipped")
    set_distribution(_model_parallel(1, 2))
    with pytest.warns(UserWarning, match="run eagerly"):
        _, found = _fitted("adam, clipped", run_eagerly=True)
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, expected)


def test_files_are_those_of_one_device(tmp_path: Path) -> None:
    set_distribution(_model_parallel(1, 4))
    model, found = _fitted("adam, clipped")
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "own.weights.h5")
    state = [np.array(each) for each in model.optimizer.variables]
    set_distribution(None)
    alone = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(alone.predict(_WORDS, verbose=0), found["predicted"], atol=1e-5)
    for own, each in zip(alone.optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(own, each)
    set_distribution(_model_parallel(1, 2))
    other = _block()
    other.load_weights(tmp_path / "own.weights.h5")
    np.testing.assert_allclose(other.predict(_WORDS, verbose=0), found["predicted"], atol=1e-5)


def _loop() -> list[float]:
    keras.utils.set_random_seed(1)
    model, optimizer = _block(), keras.optimizers.Adam(0.01)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return [float(step(_WORDS[i : i + 8], _KINDS[i : i + 8])) for i in range(0, 32, 8)]


@pytest.mark.parametrize("axes", [(1, 2), (2, 2)])
def test_a_custom_loop(axes: tuple[int, int]) -> None:
    expected = _loop()
    set_distribution(_model_parallel(*axes))
    np.testing.assert_allclose(_loop(), expected, rtol=1e-5)


_ON_A_MESH = """
import os
import keras
import numpy as np
from keras_integration.test_distribution import _fitted, _model_parallel

keras.distribution.initialize()
keras.distribution.set_distribution(_model_parallel(2, 2))
model, found = _fitted("adam, clipped")
print([part.shape.as_list() for part in model.get_layer("into").kernel.value.values])
np.savez(f"found{os.getpid()}.npz", *found["loss"], *found["weights"], found["predicted"])
"""


@pytest.mark.lane("sharded_training")
@pytest.mark.parametrize("transport", ["shared_memory", "tf", "horovod"])
def test_a_mesh_of_processes(transport: str, tmp_path: Path) -> None:
    _, expected = _fitted("adam, clipped")
    script = tmp_path / "script.py"
    script.write_text(_ON_A_MESH)
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "4", "--communicator", transport, str(script)]
    environ = inherited_environ() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=2 * _LIMIT, check=False)
    assert run.returncode == 0, run.stderr
    assert "[[4, 8]]" in run.stdout
    right = [*expected["loss"], *expected["weights"], expected["predicted"]]
    files = list(tmp_path.glob("*.npz"))
    assert len(files) == 4
    for file in files:
        with np.load(file) as found:
            for value, wanted in zip(found.values(), right, strict=True):
                np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.lane("quick")
def test_a_mesh_whose_rows_are_shared_by_all() -> None:
    """Groups of replicas that have the same rows are consecutive, and no replica has a part of the optimizer's state alone."""
    second = ModelParallel(layout_map=LayoutMap(DeviceMesh((2, 2), ["model", "batch"])), batch_dim_name="batch")
    with pytest.warns(UserWarning, match="(?s)'model': 2, 'batch': 2.*name the axis of the batch first"):
        set_distribution(second)
    set_distribution(None)
    with tfrep.MirroredStrategy(shard_optimizer_state=True).scope():
        with pytest.warns(UserWarning, match="leave out shard_optimizer_state"):
            set_distribution(_model_parallel(2, 2))
        set_distribution(None)


@pytest.mark.lane("quick")
def test_layouts_that_do_not_fit() -> None:
    mesh = DeviceMesh((1, 4), ["batch", "model"])
    for layout, received in (((None, "model"), {"shape": (4, 6)}), (("model",), {"layout": ("model",)})):
        layouts = LayoutMap(mesh)
        layouts["d/kernel"] = layout
        set_distribution(ModelParallel(layout_map=layouts))
        with refuses(variable="d/kernel", **received):
            keras.layers.Dense(6, name="d").build((None, 4))


@pytest.mark.lane("quick")
def test_a_layout_of_no_variable() -> None:
    layouts = LayoutMap(DeviceMesh((1, 4), ["batch", "model"]))
    layouts["no_such_layer/kernel"] = (None, "model")
    set_distribution(ModelParallel(layout_map=layouts))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with refuses(patterns=["no_such_layer/kernel"], hint="v.path"):
        model.fit(_X, _X[:, :1], verbose=0)


@pytest.mark.lane("quick")
def test_two_layouts_for_one_variable() -> None:
    layouts = LayoutMap(DeviceMesh((1, 4), ["batch", "model"]))
    layouts["d/ker.*"], layouts[".*/kernel"] = (None, "model"), ("model", None)
    set_distribution(ModelParallel(layout_map=layouts))
    with refuses(ValueError, told=["d/kernel", "multiple"]):
        keras.layers.Dense(8, name="d").build((None, 4))


@pytest.mark.lane("quick")
def test_an_assigned_variable_keeps_its_layout() -> None:
    set_distribution(_model_parallel(2, 2))
    layer = keras.layers.Dense(16, name="into")
    layer.build((None, 8))
    value = np.arange(128, dtype="float32").reshape(8, 16)
    layer.kernel.assign(value)
    np.testing.assert_array_equal(layer.kernel, value)
    parts = layer.kernel.value.values
    for (row, column), part in zip(itertools.product((0, 4), (0, 8)), parts, strict=True):
        np.testing.assert_array_equal(part, value[row : row + 4, column : column + 8])


@pytest.mark.lane("quick")
def test_layouts_of_tensors_change_no_value() -> None:
    """Those of outputs, as a map may name them, and those that `distribute_tensor` is given."""

    class Placed(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            current = keras.distribution.distribution()
            if current is None:
                return x
            layout = keras.distribution.TensorLayout(["batch", "model"], current.device_mesh)
            return keras.distribution.distribute_tensor(x, layout)

    def predicted() -> np.ndarray:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(8, "relu", name="into"), Placed(), keras.layers.Dense(4, name="out")])
        return model.predict(_X, verbose=0)

    expected, layouts = predicted(), LayoutMap(DeviceMesh((2, 2), ["batch", "model"]))
    layouts[".*into/kernel"], layouts[".*into/output"] = (None, "model"), ("batch", "model")
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    np.testing.assert_allclose(predicted(), expected, rtol=1e-6, atol=1e-6)


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
