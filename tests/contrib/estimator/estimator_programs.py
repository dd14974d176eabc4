"""A model, data, and what one device gives, for the tests of estimators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfrep_strategy as tfrep

X = np.random.RandomState(0).randn(44, 4).astype("float32")
Y = X[:, :1] * 2 - X[:, 1:2]
ALL = np.arange(len(X))
PER_REPLICA = 4


def own_loss(y: Any, predicted: Any) -> Any:
    """A function that Keras cannot find by name."""
    return keras.ops.mean(keras.ops.square(y - predicted), -1)


def make_model() -> keras.Model:
    """Makes a compiled model, with the same weights each time, in whatever scope it is called."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,), name="numbers")
    outputs = keras.layers.Dense(1, name="sum")(keras.layers.Dense(8, "tanh", name="hidden")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.05), own_loss, metrics=["mae"])
    return model


def two() -> tfrep.MirroredStrategy:
    """Returns a strategy of two replicas in this process."""
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"])


def estimator_in(folder: Path, model: Any = None, **settings: Any) -> Any:
    """Makes an estimator."""
    return tfrep.estimator.model_to_estimator(model or make_model(), str(folder), tfrep.estimator.RunConfig(**settings))


def steps_saved(folder: Path) -> list[int]:
    """Returns the global steps of the checkpoints in a folder."""
    return sorted(int(path.suffixes[-2].partition("-")[2]) for path in folder.glob("model.ckpt-*.index"))


def scalars(folder: Path, name: str) -> dict[int, float]:
    """Returns the summaries of a name in a folder, by global step."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}


def input_fn() -> tf.data.Dataset:
    """Gives 11 batches for replicas."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(PER_REPLICA)


def shuffled_input_fn() -> tf.data.Dataset:
    """Gives batches in an order that depends on TensorFlow's seed."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(44).repeat().batch(PER_REPLICA)


def input_fn_of_process(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Gives batches of every `n`-th example, where `n` is the number of processes."""
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    if input_context:
        examples = examples.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return examples.batch(PER_REPLICA)


def global_batches(order: Sequence[np.ndarray], replicas_of_process: int = 1) -> list[np.ndarray]:
    """Puts the batches of replicas together: the indices of the examples of each step of one device.

    Args:
        order: The examples that each process reads.
        replicas_of_process: How many replicas a process has.
    """
    size = PER_REPLICA * replicas_of_process
    steps = -(-max(map(len, order)) // size)
    return [np.concatenate([own[i * size : (i + 1) * size] for own in order]) for i in range(steps)]


def one_device(steps: Sequence[np.ndarray]) -> dict[str, Any]:
    """Trains with plain Keras on the examples of each step, and evaluates all examples."""
    model = make_model()
    losses = [
        float(model.train_on_batch(X[step], Y[step], return_dict=True)["loss"]) for step in steps if not model.reset_metrics()
    ]
    results = model.evaluate(X, Y, return_dict=True, verbose=0)
    return {
        "weights": model.get_weights(),
        "losses": losses,
        "results": results,
        "predictions": model.predict(X, verbose=0),
    }


class Records(tfrep.estimator.SessionRunHook):
    """Notes what it is called with, and does something at a step."""

    def __init__(self, at: int = -1, act: Callable[[Any], None] = lambda context: None) -> None:
        self.calls: list[str] = []
        self.values: list[dict[str, Any]] = []
        self._at, self._act = at, act

    def begin(self) -> None:
        self.calls.append("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.calls.append("after_create_session")

    def before_run(self, run_context: Any) -> Any:
        self.calls.append("before_run")
        return tfrep.estimator.SessionRunArgs({"loss": "loss", "step": "global_step"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.calls.append("after_run")
        self.values.append(run_values.results)
        if run_context.session.global_step == self._at:
            self._act(run_context)

    def end(self, session: Any) -> None:
        self.calls.append("end")


def train_through_estimator(strategy: Any, folder: str, kind: str) -> dict[str, Any]:
    """Trains to the end of the data in two calls, evaluates, predicts.

    Args:
        strategy: The strategy; None for one device.
        folder: The folder of the estimator.
        kind: The name of an input function of this module.
    """
    given = {"input_fn": input_fn, "input_fn_of_process": input_fn_of_process}[kind]
    config = tfrep.estimator.RunConfig(
        folder, train_distribute=strategy, eval_distribute=strategy, save_checkpoints_steps=2, save_summary_steps=2
    )
    estimator = tfrep.estimator.model_to_estimator(make_model(), config=config)
    hook = Records()
    estimator.train(given, hooks=[hook])
    results = estimator.evaluate(given)
    alone = estimator.config.replace(eval_distribute=None)
    by_one = tfrep.estimator.model_to_estimator(make_model(), config=alone).evaluate(input_fn)
    predictions = [example["sum"] for example in estimator.predict(input_fn)]
    return {
        "weights": [estimator.get_variable_value(f"{layer}/{part}") for layer in ("hidden", "sum") for part in ("kernel", "bias")],
        "losses": [value["loss"] for value in hook.values],
        "steps": [value["step"] for value in hook.values],
        "results": results,
        "by_one": by_one,
        "predictions": np.array(predictions),
        "latest": os.path.basename(estimator.latest_checkpoint() or ""),
        "in_model_dir": sorted(os.listdir(folder)),
    }


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares what an estimator gave with one device."""
    for weight, wanted in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["predictions"], expected["predictions"], rtol=1e-5, atol=1e-6)
    steps = len(expected["losses"])
    assert found["steps"] == list(range(1, steps + 1))
    assert found["latest"] == f"model.ckpt-{steps}"
    for results in (found["results"], found["by_one"]):
        assert results["global_step"] == steps
        for name, value in expected["results"].items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, err_msg=name)
