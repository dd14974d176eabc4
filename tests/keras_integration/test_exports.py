"""A model that was trained under a strategy, exported to what serves it, answers as `predict` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("callbacks")

litert = pytest.importorskip("ai_edge_litert.interpreter")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("tf2onnx")

_X = np.random.RandomState(0).rand(96, 8, 8, 1).astype("float32")
_Y = (_X.mean((1, 2, 3)) > 0.5).astype("int32")


def _trained(strategy: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3, "softmax"),
        ]
        model = keras.Sequential(layers)
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(_X, _Y, batch_size=16, epochs=2, verbose=0)
    return model


def _representative() -> Any:
    return ([_X[i : i + 1]] for i in range(len(_X)))


def _write(model: Any, folder: Path, in_int8: bool = True) -> None:
    """Writes the model in each format."""
    model.export(folder / "saved", verbose=False)
    model.export(folder / "model.onnx", format="onnx", verbose=False)
    model.export(folder / "model.tflite", format="litert", verbose=False)
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    (folder / "float.tflite").write_bytes(converter.convert())
    if in_int8:
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = _representative
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = converter.inference_output_type = tf.int8
        (folder / "int8.tflite").write_bytes(converter.convert())


def _run_litert(path: Path) -> np.ndarray:
    interpreter = litert.Interpreter(model_path=str(path))
    interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], _X.shape)
    interpreter.allocate_tensors()
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    values = _X
    if given["dtype"] == np.int8:
        scale, zero = given["quantization"]
        values = np.clip(np.round(_X / scale + zero), -128, 127).astype(np.int8)
    interpreter.set_tensor(given["index"], values)
    interpreter.invoke()
    output = interpreter.get_tensor(result["index"])
    if result["dtype"] == np.int8:
        scale, zero = result["quantization"]
        output = (output.astype("float32") - zero) * scale
    return output


def _check(folder: Path, predicted: np.ndarray) -> None:
    saved = tf.saved_model.load(str(folder / "saved"))
    np.testing.assert_allclose(saved.serve(_X), predicted, rtol=1e-5, atol=1e-6)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: _X})
    np.testing.assert_allclose(found, predicted, rtol=1e-4, atol=1e-5)
    for name in ("model", "float"):
        np.testing.assert_allclose(_run_litert(folder / f"{name}.tflite"), predicted, rtol=1e-4, atol=1e-5)
    if (folder / "int8.tflite").exists():
        np.testing.assert_allclose(_run_litert(folder / "int8.tflite"), predicted, atol=0.05)


@pytest.mark.parametrize("in_scope", [False, True])
def test_mirrored(in_scope: bool, tmp_path: Path) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    model = _trained(strategy)
    if in_scope:
        with strategy.scope():
            _write(model, tmp_path, in_int8=False)
    else:
        _write(model, tmp_path)
    _check(tmp_path, model.predict(_X, verbose=0))


def _export_on_rank(strategy: Any, folder: Path) -> np.ndarray:
    model = _trained(strategy)
    own = folder / f"rank{strategy.rank}"
    own.mkdir()
    _write(model, own)
    model.export(folder / "shared.onnx", format="onnx", verbose=False)
    predicted = model.predict(_X, verbose=0)
    for _ in range(3):  # Ranks that write at once do not always meet.
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", model.call, [tf.TensorSpec((None, 8, 8, 1))])
        archive.write_out(str(folder / "archive"), verbose=False)
    with strategy.scope():
        loaded = tf.saved_model.load(str(folder / "archive"))
    np.testing.assert_allclose(loaded.serve(_X), predicted, rtol=1e-5, atol=1e-6)
    _load_own_file(strategy, own)
    return predicted


def _load_own_file(strategy: Any, own: Path) -> None:
    """Loads a file that each rank has written, in which variables are in another order on each."""
    rows = tf.random.normal((3, 8))
    with strategy.scope():
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(8)]
        model = keras.Sequential([keras.Input((8,)), *layers])
    module = tf.Module()
    module.kernels = {str(i): layers[i].kernel.value for i in np.random.RandomState(strategy.rank).permutation(8)}
    module.own = [layers[i].kernel.value for i in np.random.RandomState(strategy.rank).permutation(8)]
    module.serve = tf.function(model, input_signature=[tf.TensorSpec((None, 8))])
    tf.saved_model.save(module, str(own / "own"))
    with strategy.scope():
        loaded = tf.saved_model.load(str(own / "own"))
    np.testing.assert_allclose(loaded.serve(rows), model(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_processes(communicator: str, worker_pool: Any, tmp_path: Path) -> None:
    for rank, predicted in enumerate(worker_pool(communicator, 2).run(_export_on_rank, tmp_path)):
        _check(tmp_path / f"rank{rank}", predicted)
    assert (tmp_path / "shared.onnx").stat().st_size
