"""Checkpoints are evaluated while a training in another process writes them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("servers")


def _model() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _data() -> tf.data.Dataset:
    x = np.random.RandomState(0).randn(64, 4).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)


def _train() -> None:
    model = _model()
    save = keras.callbacks.ModelCheckpoint("checkpoints/ckpt-{epoch}.weights.h5", save_weights_only=True)
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.7))
    model.fit(_data(), epochs=4, verbose=0, callbacks=[save, pause])


def test_each_new_checkpoint_is_evaluated(tmp_path: Path) -> None:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    training = subprocess.Popen(command(_train), cwd=tmp_path, env=environ)
    try:
        logs = keras.callbacks.TensorBoard(str(tmp_path / "logs"))
        evaluator = tfrep.SidecarEvaluator(
            _model(), _data(), tmp_path / "checkpoints", max_evaluations=4, callbacks=[logs], poll_seconds=0.1, timeout=60
        )
        history = evaluator.start()
        assert training.wait(60) == 0
    finally:
        training.kill()
        training.wait()
    assert history["checkpoint"] == sorted(set(history["checkpoint"]))
    assert history["checkpoint"][-1] == 4
    assert len(history["loss"]) >= 2
    assert history["loss"][-1] < history["loss"][0]


def test_metrics_of_several_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    model.save_weights(tmp_path / "ckpt-1.weights.h5")
    data = np.ones((8, 4), "float32"), np.eye(3, dtype="float32")[np.arange(8) % 3]
    evaluator = tfrep.SidecarEvaluator(model, data, tmp_path, max_evaluations=1, poll_seconds=0.01, timeout=60)
    [scores] = evaluator.start()["f1"]
    assert np.shape(scores) == (3,)
    assert "f1: [" in capsys.readouterr().out


def test_it_stops_when_nothing_comes(tmp_path: Path) -> None:
    evaluator = tfrep.SidecarEvaluator(_model(), _data(), tmp_path / "none", poll_seconds=0.05, timeout=0.3)
    assert evaluator.start() == {}


@pytest.mark.lane("quick")
def test_whole_models_and_a_file_that_is_still_written(tmp_path: Path) -> None:
    model = _model()
    (tmp_path / "model-1.weights.h5").write_bytes(b"half a file")
    data = tfrep.DatasetCreator(lambda context: _data())
    evaluator = tfrep.SidecarEvaluator(_model(), data, tmp_path, poll_seconds=0.05, timeout=1.0)
    assert evaluator.start() == {}
    model.save(tmp_path / "model-2.keras")
    history = evaluator.start()
    assert history["checkpoint"] == [2]
    assert history["loss"][0] == pytest.approx(model.evaluate(_data(), verbose=0), rel=1e-5)


def _save(folder: Path, name: str, written: float) -> float:
    """Saves a model that was never saved before; returns its loss."""
    model = _model()
    model.save(folder / name)
    os.utime(folder / name, (written, written))
    return model.evaluate(_data(), verbose=0)


@pytest.mark.parametrize("known", [["x"], ["c", "b", "a"]])
def test_what_preprocessing_layers_of_a_saved_model_have_learned(known: list[str], tmp_path: Path) -> None:
    """The evaluator's own model was adapted to something else."""
    x = np.random.RandomState(0).normal(100.0, 5.0, (8, 2)).astype("float32")
    words = np.array([["a"], ["b"]] * 4)

    def model(numbers: np.ndarray, vocabulary: Any) -> Any:
        scale, look_up = (
            keras.layers.Normalization(),
            keras.layers.StringLookup(output_mode="multi_hot", max_tokens=5, pad_to_max_tokens=True),
        )
        scale.adapt(numbers)
        look_up.adapt(vocabulary)
        inputs = keras.Input((2,)), keras.Input((1,), dtype="string")
        both = keras.layers.Concatenate()([scale(inputs[0]), look_up(inputs[1])])
        made = keras.Model(inputs, keras.layers.Dense(1)(both))
        made.compile("sgd", "mse")
        return made

    trained = model(x, words)
    data = tf.data.Dataset.from_tensor_slices(((x, words), x[:, :1])).batch(4)
    trained.save(tmp_path / "ckpt-1.keras")
    history = tfrep.SidecarEvaluator(model(x * 7.0, known), data, tmp_path, max_evaluations=1, poll_seconds=0.05).start()
    assert history["loss"] == pytest.approx([trained.evaluate(data, verbose=0)], rel=1e-5)


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """Whatever the numbers in the names are: epochs, or decimals of a loss."""
    _save(tmp_path, "01-0.90.keras", 1000)
    loss = _save(tmp_path, "02-0.35.keras", 2000)
    evaluator = tfrep.SidecarEvaluator(_model(), _data(), tmp_path, poll_seconds=0.05, timeout=0.5)
    history = evaluator.start()
    assert history == {"checkpoint": [2], "loss": [pytest.approx(loss, rel=1e-5)]}
    # Written in the same moment: the later epoch. The same decimals: another checkpoint.
    _save(tmp_path, "9-0.90.keras", 3000)
    loss = _save(tmp_path, "10-0.35.keras", 3000)
    assert evaluator.start()["checkpoint"] == [2, 10]
    assert history["loss"][1] == pytest.approx(loss, rel=1e-5)
    # Nothing is evaluated twice, though it was written again, unless its name has no number.
    _save(tmp_path, "10-0.35.keras", 4000)
    assert evaluator.start()["checkpoint"] == [2, 10]
    for written in (5000, 6000):
        _save(tmp_path, "best.keras", written)
        evaluator.start()
    assert history["checkpoint"] == [2, 10, 1, 1]


def test_half_a_model_is_tried_again(tmp_path: Path) -> None:
    model = _model()
    model.save(tmp_path / "whole.keras")
    content = (tmp_path / "whole.keras").read_bytes()
    (tmp_path / "whole.keras").unlink()
    (tmp_path / "model-1.keras").write_bytes(content[: len(content) // 2])
    evaluator = tfrep.SidecarEvaluator(_model(), _data(), tmp_path, poll_seconds=0.01, timeout=0.1)
    assert evaluator.start() == {}
    (tmp_path / "model-1.keras").write_bytes(content)
    assert evaluator.start()["checkpoint"] == [1]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("settings", [{"steps": 0}, {"max_evaluations": -1}, {"poll_seconds": 0}])
def test_bad_settings(tmp_path: Path, settings: Any) -> None:
    with refuses(**settings):
        tfrep.SidecarEvaluator(_model(), _data(), tmp_path, **settings)


def test_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with refuses(hint="compile", model=...):
        tfrep.SidecarEvaluator(model, _data(), tmp_path)
