"""Estimators in one process: on one device and on two mirrored replicas."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from estimator_programs import (
    X,
    Y,
    Records,
    check_equal,
    global_batches,
    input_fn,
    make_model,
    one_device,
    shuffled_input_fn,
    train_through_estimator,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError, HookError

_ALL = np.arange(len(X))
_EXAMPLES = tf.data.Dataset.from_tensor_slices((X, Y))


def two() -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"])


def estimator_in(folder: Path, model: Any = None, **settings: Any) -> Any:
    return tfrep.estimator.model_to_estimator(model or make_model(), str(folder), tfrep.estimator.RunConfig(**settings))


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.suffixes[-2].partition("-")[2]) for path in folder.glob("model.ckpt-*.index"))


def scalars(folder: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}


# The answer.


@pytest.mark.parametrize("kind", ["input_fn", "input_fn_of_process"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_replica_takes_a_batch_of_its_own(replicas: int, kind: str, tmp_path: Path) -> None:
    """44 examples are 11 batches of 4: with two replicas, five steps of 8 examples and one of 4."""
    strategy = two() if replicas == 2 else None
    found = train_through_estimator(strategy, str(tmp_path), kind)
    expected = one_device(global_batches([_ALL], replicas))
    assert len(expected["losses"]) == {1: 11, 2: 6}[replicas]
    check_equal(found, expected)


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
    expected = one_device(global_batches([_ALL])[:5])["weights"]
    np.testing.assert_allclose(other.get_variable_value("hidden/kernel"), expected[0], rtol=1e-5, atol=1e-6)
    assert other.get_variable_value("global_step") == 5
    assert any(name.endswith("/iteration") for name in other.get_variable_names())


def test_a_shuffle_without_a_seed_has_the_order_of_the_config(tmp_path: Path) -> None:
    def losses(name: str, seed: int | None) -> list[float]:
        hook = Records()
        estimator_in(tmp_path / name, tf_random_seed=seed).train(shuffled_input_fn, hooks=[hook], steps=3)
        return [value["loss"] for value in hook.values]

    assert losses("a", 1) == losses("b", 1) != losses("c", 2)
    assert losses("d", None) != losses("e", None)


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
    with pytest.raises(ConfigurationError, match=r"no such output.*predict_keys='triple'\nHint: use one of \['double', 'sum'\]"):
        next(estimator.predict(lambda: features, predict_keys="triple"))


def test_tensors_are_the_batch_of_every_step(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path).train(lambda: (X, Y), steps=3)
    expected = one_device([_ALL] * 3)
    results = estimator.evaluate(lambda: (X, Y))
    assert results == pytest.approx(expected["results"] | {"global_step": 3}, rel=1e-5)


# When it ends.


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


@pytest.mark.parametrize("limits", [{"steps": 1, "max_steps": 2}, {"steps": 0}, {"max_steps": -1}])
def test_limits_that_say_nothing(limits: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(limits))):
        estimator_in(tmp_path).train(input_fn, **limits)


def test_evaluation_without_a_checkpoint_is_of_the_given_weights(tmp_path: Path) -> None:
    results = estimator_in(tmp_path).evaluate(input_fn)
    assert results == pytest.approx(one_device([])["results"] | {"global_step": 0}, rel=1e-5)
    some = estimator_in(tmp_path, eval_distribute=two()).evaluate(input_fn, steps=2)
    assert some["loss"] == pytest.approx(make_model().evaluate(X[:16], Y[:16], verbose=0)[0], rel=1e-5)


# Hooks.


class TimeHistory:
    """The hook of an article, which derives from nothing here."""

    def begin(self) -> None:
        self.times: list[float] = []

    def before_run(self, run_context: Any) -> None:
        self.iter_time_start = time.time()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        assert run_values.results is None
        self.times.append(time.time() - self.iter_time_start)


def test_a_hook_with_some_methods_only(tmp_path: Path) -> None:
    history = TimeHistory()
    estimator = estimator_in(tmp_path, train_distribute=two()).train(input_fn, hooks=[history])
    assert len(history.times) == 6
    assert min(history.times) > 0
    estimator.evaluate(input_fn, hooks=[history])
    assert len(history.times) == 11


def test_the_order_of_calls(tmp_path: Path) -> None:
    hook = Records()
    estimator_in(tmp_path).train(input_fn, hooks=[hook], steps=2)
    assert hook.calls == ["begin", "after_create_session", *["before_run", "after_run"] * 2, "end"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_stops_the_training(replicas: int, tmp_path: Path) -> None:
    hook = Records(2, lambda context: context.request_stop())
    estimator = estimator_in(tmp_path, train_distribute=two() if replicas == 2 else None).train(input_fn, hooks=[hook])
    assert estimator.evaluate(input_fn)["global_step"] == 2
    assert hook.calls[-1] == "end"
    stop = tfrep.estimator.StopAtStepHook(num_steps=3)
    assert estimator.train(input_fn, hooks=[stop]).evaluate(input_fn)["global_step"] == 5


def fails(context: Any) -> None:
    raise ValueError("no more paper")


def test_a_hook_that_fails(tmp_path: Path) -> None:
    hook, other = Records(3, fails), Records()
    estimator = estimator_in(tmp_path, save_checkpoints_steps=2)
    with pytest.raises(HookError, match=r"^Records\.after_run raised ValueError at global step 3: no more paper$") as caught:
        estimator.train(input_fn, hooks=[hook, other])
    assert isinstance(caught.value.__cause__, ValueError)
    assert hook.calls[-1] == "after_run"
    assert len(other.values) == 2
    assert steps_saved(tmp_path) == [0, 2], "nothing is saved after the error"
    assert estimator.evaluate(input_fn)["global_step"] == 2


@pytest.mark.parametrize("method", ["begin", "before_run", "end"])
def test_any_method_may_fail(method: str, tmp_path: Path) -> None:
    hook = Records()
    setattr(hook, method, lambda *args: fails(None))
    with pytest.raises(HookError, match=f"^Records.{method} raised ValueError at global step"):
        estimator_in(tmp_path).train(input_fn, hooks=[hook], steps=2)


def test_a_hook_that_asks_for_what_there_is_not(tmp_path: Path) -> None:
    hook = Records()
    hook.before_run = lambda context: tfrep.estimator.SessionRunArgs(["loss", "speed"])  # type: ignore[method-assign]
    with pytest.raises(HookError, match=r"Received: fetches='speed'\nHint: ask for one of \['global_step', 'loss', 'mae'\]"):
        estimator_in(tmp_path).train(input_fn, hooks=[hook])


def test_there_is_no_session(tmp_path: Path) -> None:
    hook = Records(1, lambda context: context.session.run("weights"))
    with pytest.raises(HookError, match=r"no attribute 'run'\.\nHint: there is no session"):
        estimator_in(tmp_path).train(input_fn, hooks=[hook])


# Files.


def test_checkpoints_and_summaries(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path, save_checkpoints_steps=3, keep_checkpoint_max=3, save_summary_steps=4, log_step_count_steps=5)
    estimator.train(input_fn)
    expected = one_device(global_batches([_ALL]))
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
    estimator_in(tmp_path, save_checkpoints_secs=0.12, keep_checkpoint_max=None).train(input_fn, hooks=[slow])
    assert 3 <= len(steps_saved(tmp_path)) <= 7
    assert steps_saved(tmp_path)[-1] == 11


def test_the_checkpoint_of_another_model(tmp_path: Path) -> None:
    estimator_in(tmp_path).train(input_fn, steps=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    with pytest.raises(ConfigurationError, match="another model") as caught:
        estimator_in(tmp_path, model).evaluate(input_fn)
    assert "model.ckpt-1" in str(caught.value)


def test_the_checkpoint_is_one_of_tensorflow(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path, train_distribute=two()).train(input_fn)
    model = make_model()
    tf.train.Checkpoint(model=model).restore(estimator.latest_checkpoint()).expect_partial()
    np.testing.assert_allclose(model.get_weights()[0], one_device(global_batches([_ALL], 2))["weights"][0], rtol=1e-5, atol=1e-6)


def test_export(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path / "model", train_distribute=two()).train(input_fn)
    path = estimator.export_saved_model(tmp_path / "exports")
    assert path == os.path.join(tmp_path, "exports", "6")
    served = tf.saved_model.load(path).serve(X)
    np.testing.assert_allclose(served, one_device(global_batches([_ALL], 2))["predictions"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match="leave it out"):
        estimator.export_saved_model(tmp_path / "exports", lambda: None)


# Training and evaluating.


def test_evaluations_during_the_training(tmp_path: Path) -> None:
    """They do not disturb it, and the data does not begin again."""
    hook = Records()
    both = two()
    estimator = estimator_in(tmp_path, train_distribute=both, eval_distribute=both, save_checkpoints_steps=2)
    train_spec = tfrep.estimator.TrainSpec(input_fn, max_steps=5, hooks=[hook])
    eval_spec = tfrep.estimator.EvalSpec(input_fn, steps=None, throttle_secs=0)
    results, exports = tfrep.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    expected = one_device(global_batches([_ALL], 2)[:5])
    np.testing.assert_allclose([value["loss"] for value in hook.values], expected["losses"], rtol=1e-5)
    assert results == pytest.approx(expected["results"] | {"global_step": 5}, rel=1e-5)
    assert list(scalars(tmp_path / "eval", "loss")) == [2, 4, 5]
    assert exports == []


def test_evaluations_are_throttled(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path, save_checkpoints_steps=2)
    train_spec = tfrep.estimator.TrainSpec(input_fn)
    tfrep.estimator.train_and_evaluate(estimator, train_spec, tfrep.estimator.EvalSpec(input_fn))
    assert list(scalars(tmp_path / "eval", "loss")) == [11]


# What is refused.


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lambda: {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, "leave out one of the two"),
        (lambda: {"save_summary_steps": 0}, "save_summary_steps=0"),
        (lambda: {"save_checkpoints_secs": -1.0}, "save_checkpoints_secs=-1.0"),
        (lambda: {"train_distribute": tf.distribute.get_strategy()}, r"tfrep\.MirroredStrategy\(\)"),
        (lambda: {"session_config": "allow_growth"}, "there is no session"),
    ],
)
def test_settings_that_cannot_be_used(settings: Callable[[], dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        tfrep.estimator.RunConfig(**settings())


def test_input_functions_that_return_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="input_fn returned nothing"):
        estimator_in(tmp_path).train(lambda: None)


def test_two_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Two folders"):
        estimator_in(tmp_path / "a", model_dir=str(tmp_path / "b"))
