"""Models that become estimators, when a call ends, and the files of an estimator."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from estimator_programs import (
    ALL,
    Records,
    X,
    Y,
    estimator_in,
    global_batches,
    input_fn,
    make_model,
    one_device,
    scalars,
    steps_saved,
    two,
)
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.lane("migration")

# Models, and when a call ends.


def test_the_model_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    model = make_model()
    before = model.get_weights()
    estimator_in(tmp_path, model, train_distribute=two()).train(input_fn, steps=2)
    np.testing.assert_equal(model.get_weights(), before)
    assert int(model.optimizer.iterations) == 0


def test_each_call_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    """Also that of another estimator, and the state of the optimizer belongs to it."""
    estimator_in(tmp_path).train(input_fn, steps=2)
    other = estimator_in(tmp_path).train(lambda: input_fn().skip(2), max_steps=5)
    expected = one_device(global_batches([ALL])[:5])["weights"]
    np.testing.assert_allclose(other.get_variable_value("hidden/kernel"), expected[0], rtol=1e-5, atol=1e-6)
    assert other.get_variable_value("global_step") == 5
    assert any(name.endswith("/iteration") for name in other.get_variable_names())


def test_a_folder_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    model = estimator_in(tmp_path)
    for _ in range(2):
        model.train(input_fn, max_steps=3)
        expected = one_device(global_batches([ALL])[:3])["weights"]
        np.testing.assert_allclose(model.get_variable_value("hidden/kernel"), expected[0], rtol=1e-5, atol=1e-6)
        assert model.get_variable_value("global_step") == 3
        shutil.rmtree(tmp_path)
    assert model.evaluate(input_fn, steps=1)["global_step"] == 0


def test_metrics_of_several_numbers(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    labels = np.eye(2, dtype="float32")[np.arange(len(X)) % 2]
    estimator = estimator_in(tmp_path, model)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((X, labels)).batch(8), steps=2)
    results = estimator.evaluate(lambda: tf.data.Dataset.from_tensor_slices((X, labels)).batch(8))
    assert results["f1"].shape == (2,)
    assert isinstance(results["loss"], float)


@pytest.mark.lane("quick")
def test_features_by_name_and_outputs_by_name(tmp_path: Path) -> None:
    parts = {"left": keras.Input((2,), name="left"), "right": keras.Input((2,), name="right")}
    both = keras.layers.Concatenate()([parts["left"], parts["right"]])
    model = keras.Model(parts, {"sum": keras.layers.Dense(1)(both), "double": keras.layers.Dense(2)(both)})
    model.compile("sgd", {"sum": "mse", "double": "mae"})
    features = {"left": X[:, :2], "right": X[:, 2:]}
    labels = {"sum": Y, "double": X[:, :2]}
    estimator = estimator_in(tmp_path, model, train_distribute=two())
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(4), steps=2)
    batches = list(estimator.predict(lambda: (features, labels), predict_keys=["double"], yield_single_examples=False))
    assert [{name: value.shape for name, value in batch.items()} for batch in batches] == [{"double": (44, 2)}]
    with refuses(hint="use one of ['double', 'sum']", predict_keys="triple"):
        next(estimator.predict(lambda: features, predict_keys="triple"))


@keras.saving.register_keras_serializable()
class Doubled(keras.Model):
    """A model that is a class, with a step of its own."""

    def __init__(self, units: int = 1) -> None:
        super().__init__()
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return 2 * self.dense(inputs)

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step((data[0], 2 * data[1]))


def doubled() -> Doubled:
    keras.utils.set_random_seed(3)
    model = Doubled()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), "mse")
    model(X)
    return model


def test_a_model_that_is_a_class(tmp_path: Path) -> None:
    expected = doubled()
    expected.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    estimator = estimator_in(tmp_path, doubled(), train_distribute=two()).train(input_fn)
    (kernel,) = [name for name in estimator.get_variable_names() if name.endswith("kernel")]
    np.testing.assert_allclose(estimator.get_variable_value(kernel), expected.get_weights()[0], rtol=1e-5, atol=1e-6)


def test_what_preprocessing_layers_have_learned(tmp_path: Path) -> None:
    """Beside weights: numbers that `Normalization` keeps, and vocabularies."""
    x = np.random.RandomState(0).normal(1000.0, 5.0, (16, 4)).astype("float32")
    words = tf.constant([["a"], ["b"], ["c"], ["a"]] * 4)
    scale, look_up = keras.layers.Normalization(), keras.layers.StringLookup(output_mode="one_hot")
    bins = keras.layers.Discretization(num_bins=4, output_mode="multi_hot")
    scale.adapt(x)
    bins.adapt(x)
    look_up.adapt(words)
    inputs = {"x": keras.Input((4,), name="x"), "word": keras.Input((1,), dtype="string", name="word")}
    all_of_them = keras.layers.Concatenate()([scale(inputs["x"]), bins(inputs["x"]), look_up(inputs["word"])])
    model = keras.Model(inputs, keras.layers.Dense(1)(all_of_them))
    model.compile("sgd", "mse")
    features, y = {"x": x, "word": words}, x[:, :1] - 1000.0
    expected = model.evaluate(features, y, verbose=0)
    found = estimator_in(tmp_path, model).evaluate(lambda: tf.data.Dataset.from_tensor_slices((features, y)).batch(16))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_functions_of_one_name_and_of_none(tmp_path: Path) -> None:
    def weighted(weight: float) -> Any:
        def loss(y: Any, predicted: Any) -> Any:
            return weight * keras.ops.mean(keras.ops.square(y - predicted), -1)

        return loss

    factor = 3.0
    inputs = keras.Input((4,))
    scaled = keras.layers.Lambda(lambda x: x / factor)(inputs)
    outputs = {name: keras.layers.Dense(1, name=name)(scaled) for name in ("a", "b", "c")}
    model = keras.Model(inputs, outputs)
    losses = {"a": weighted(1.0), "b": weighted(10.0), "c": lambda y, predicted: keras.ops.abs(y - predicted)}
    model.compile("sgd", losses)
    y = dict.fromkeys(outputs, Y)
    expected = model.evaluate(X, y, batch_size=len(X), return_dict=True, verbose=0)
    found = estimator_in(tmp_path, model).evaluate(lambda: tf.data.Dataset.from_tensor_slices((X, y)).batch(len(X)))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.lane("quick")
def test_steps_and_max_steps(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path)
    hook = Records()
    for limits, end in (({"steps": 2}, 2), ({"max_steps": 3}, 3), ({"max_steps": 3}, 3), ({"steps": 99}, 14), ({}, 25)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            estimator.train(input_fn, [hook], **limits)
        assert estimator.evaluate(input_fn, steps=1)["global_step"] == end
    assert hook.calls.count("after_run") == 25
    assert hook.calls.count("begin") == hook.calls.count("end") == 4, "a call that does nothing calls no hook"


@pytest.mark.lane("quick")
@pytest.mark.parametrize("limits", [{"steps": 1, "max_steps": 2}, {"steps": 0}, {"max_steps": -1}])
def test_limits_that_say_nothing(limits: dict[str, int], tmp_path: Path) -> None:
    with refuses(**{name: ... for name in limits}):
        estimator_in(tmp_path).train(input_fn, **limits)


def test_evaluation_without_a_checkpoint_is_of_the_given_weights(tmp_path: Path) -> None:
    results = estimator_in(tmp_path).evaluate(input_fn)
    assert results == pytest.approx(one_device([])["results"] | {"global_step": 0}, rel=1e-5)
    some = estimator_in(tmp_path, eval_distribute=two()).evaluate(input_fn, steps=2)
    assert some["loss"] == pytest.approx(make_model().evaluate(X[:16], Y[:16], verbose=0)[0], rel=1e-5)


# Files.


@pytest.mark.lane("quick")
def test_checkpoints_and_summaries(tmp_path: Path) -> None:
    estimator = estimator_in(
        tmp_path, save_checkpoints_steps=3, keep_checkpoint_max=3, save_summary_steps=4, log_step_count_steps=5
    )
    estimator.train(input_fn)
    expected = one_device(global_batches([ALL]))
    assert steps_saved(tmp_path) == [6, 9, 11]
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-11")
    losses = scalars(tmp_path, "loss")
    assert losses == pytest.approx({step: expected["losses"][step - 1] for step in (1, 4, 8)}, rel=1e-5)
    assert list(scalars(tmp_path, "global_step/sec")) == [5, 10]
    results = estimator.evaluate(input_fn, name="all")
    assert scalars(tmp_path / "eval_all", "mae") == {11: pytest.approx(results["mae"])}


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    slow = Records()
    slow.before_run = lambda context: time.sleep(0.05)  # type: ignore[method-assign,assignment]
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    estimator_in(often, save_checkpoints_secs=0.12, keep_checkpoint_max=None).train(input_fn, hooks=[slow])
    assert len(steps_saved(often)) >= 4
    assert (min(steps_saved(often)), max(steps_saved(often))) == (0, 11)
    estimator_in(seldom).train(input_fn, hooks=[slow])
    assert steps_saved(seldom) == [0, 11]


def test_a_run_makes_no_backups_beside_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tfrep run --max-restarts` backs up each `fit`. An estimator goes on from its own checkpoints."""
    monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path / "backups"))
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")
    estimator = estimator_in(tmp_path / "model", train_distribute=two())
    estimator.train(input_fn, steps=2)
    assert not (tmp_path / "backups").exists()
    with two().scope():
        make_model().fit(X, Y, verbose=0)
    assert (tmp_path / "backups").exists()


def test_the_checkpoint_of_another_model(tmp_path: Path) -> None:
    estimator_in(tmp_path).train(input_fn, steps=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    with refuses(told=["model.ckpt-1"], checkpoint=..., keras_model=model.name):
        estimator_in(tmp_path, model).evaluate(input_fn)


def test_the_checkpoint_is_one_of_tensorflow(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path, train_distribute=two()).train(input_fn)
    model = make_model()
    tf.train.Checkpoint(model=model).restore(estimator.latest_checkpoint()).expect_partial()
    np.testing.assert_allclose(model.get_weights()[0], one_device(global_batches([ALL], 2))["weights"][0], rtol=1e-5, atol=1e-6)


def test_export(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path / "model", train_distribute=two()).train(input_fn)
    path = estimator.export_saved_model(tmp_path / "exports")
    assert path == os.path.join(tmp_path, "exports", "6")
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(X), one_device(global_batches([ALL], 2))["predictions"], rtol=1e-5, atol=1e-6)
    with refuses(hint="leave it out", serving_input_receiver_fn=...):
        estimator.export_saved_model(tmp_path / "exports", lambda: None)


def test_two_folders(tmp_path: Path) -> None:
    with refuses(model_dir=str(tmp_path / "b"), config=...):
        estimator_in(tmp_path / "a", model_dir=str(tmp_path / "b"))


@pytest.mark.lane("quick")
def test_models_that_cannot_be_used() -> None:
    not_compiled = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    not_built = keras.Sequential([keras.layers.Dense(1)])
    not_built.compile("sgd", "mse")
    refused: list[tuple[Any, str]] = [
        (not_compiled, "call model.compile"), (not_built, "keras.Input"), (lambda features, labels: None, "model_fn"),
    ]  # fmt: skip
    for model, said in refused:
        with pytest.raises(ConfigurationError, match=said):
            tfrep.estimator.model_to_estimator(model)
