"""Throughput, compared with what is known of the data, and with waits that are made on purpose."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

_ROWS, _BATCH = 75, 8
_STEPS = 10
_X = np.random.RandomState(0).rand(_ROWS, 3).astype("float32")
_Y = _X.sum(1, keepdims=True)
_NAMES = ["examples_per_second", "steps_per_second", "step_ms_p50", "step_ms_p90", "step_ms_p99", "data_wait"]


def _model(**compile_options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compile_options)
    return model


def _fit(model: Any, *callbacks: Any, epochs: int = 2, **options: Any) -> dict[str, list[float]]:
    options = {"batch_size": _BATCH, "verbose": 0} | options
    return model.fit(_X, _Y, epochs=epochs, callbacks=list(callbacks), **options).history


def _check_examples(history: dict[str, list[float]], per_call: int = 1) -> None:
    """Each example and each step counts, but for those of the first call, which compiles."""
    per_step = np.divide(history["examples_per_second"], history["steps_per_second"])
    first = (_ROWS - per_call * _BATCH) / (_STEPS - per_call)
    np.testing.assert_allclose(per_step, [first] + [_ROWS / _STEPS] * (len(per_step) - 1), rtol=1e-9)
    assert all(0 < a <= b <= c for a, b, c in zip(*(history[f"step_ms_p{p}"] for p in (50, 90, 99)), strict=True))
    assert all(0 <= share <= 1 for share in history["data_wait"])


@pytest.mark.parametrize(
    ("kind", "per_call"),
    [
        *[("one device", 4), ("eager", 1), ("mirrored", 4)],
        *in_lane("callbacks", ("one device", 1), ("mirrored", 1), ("stock", 1)),
    ],
)
def test_every_example_counts(kind: str, per_call: int, stock_mirrored: Any) -> None:
    strategies = {"mirrored": lambda: tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), "stock": lambda: stock_mirrored}
    strategy = strategies[kind]() if kind in strategies else tf.distribute.get_strategy()
    with strategy.scope():
        model = _model(steps_per_execution=per_call, run_eagerly=kind == "eager")
    history = _fit(model, tfrep.callbacks.Throughput(), epochs=3, validation_split=0.0, validation_data=(_X, _Y))
    assert set(history) == {"loss", "val_loss", *_NAMES}
    _check_examples(history, per_call)


def test_data_of_unknown_length() -> None:
    def batches() -> Any:
        for start in range(0, _ROWS, _BATCH):
            yield {"a": _X[start : start + _BATCH]}, _Y[start : start + _BATCH]

    spec = {"a": tf.TensorSpec([None, 3])}, tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    inputs = keras.Input((3,), name="a")
    model = keras.Model({"a": inputs}, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    _check_examples(model.fit(data, epochs=2, verbose=0, callbacks=[tfrep.callbacks.Throughput()]).history)


class _Sleeping(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)

    def on_test_begin(self, logs: Any = None) -> None:
        time.sleep(2.0)


@pytest.mark.lane("callbacks")
def test_times_are_those_of_training() -> None:
    history = _fit(_model(), tfrep.callbacks.Throughput(), _Sleeping(), validation_data=(_X, _Y), validation_freq=2)
    # Between the starts of two steps are a sleep and a step. The sleep of validation belongs to no step.
    assert min(history["step_ms_p50"]) >= 20
    assert max(history["steps_per_second"]) <= 50
    assert history["steps_per_second"][1] > _STEPS / 2.0


def _slow(batches: Any) -> Any:
    return batches.map(lambda *batch: (tf.numpy_function(lambda v: (time.sleep(0.1), v)[1], [batch[0]], tf.float32), batch[1]))


@pytest.mark.lane("callbacks")
def test_a_slow_pipeline_is_waited_for() -> None:
    data = _slow(tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH))
    data = data.map(lambda x, y: (tf.ensure_shape(x, [None, 3]), y))
    throughput = tfrep.callbacks.Throughput()
    history = _model().fit(data, epochs=2, verbose=0, callbacks=[throughput]).history
    assert min(history["data_wait"]) > 0.2
    assert max(history["data_wait"]) <= 1


def _one_rank_reads_slowly(strategy: Any, rows: int) -> dict[str, list[float]]:
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH)
    if strategy.rank == 1:
        data = _slow(data).map(lambda x, y: (tf.ensure_shape(x, [None, 3]), y))
    with strategy.scope():
        model = _model()
    return model.fit(data, epochs=2, verbose=0, callbacks=[tfrep.callbacks.Throughput()]).history


@pytest.mark.lane("callbacks")
@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_who_waits_for_whom(communicator: str, worker_pool: Any) -> None:
    first, second = worker_pool(communicator, 2).run(_one_rank_reads_slowly, _ROWS)
    for history in (first, second):
        _check_examples(history)
        assert set(history) == {"loss", *_NAMES, "collective_wait"}
    assert second["data_wait"][1] > first["data_wait"][1] + 0.15
    assert first["collective_wait"][1] > second["collective_wait"][1] + 0.15


def _only_on_rank_0(strategy: Any) -> list[str]:
    with strategy.scope():
        model = _model()
    return list(_fit(model, *([tfrep.callbacks.Throughput()] if strategy.rank == 0 else [])))


@pytest.mark.lane("callbacks")
def test_one_rank_may_measure_alone(worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(_only_on_rank_0)
    assert set(first) == {"loss", *_NAMES, "collective_wait"}
    assert second == ["loss"]


def test_epochs_of_one_step() -> None:
    history = _fit(_model(), tfrep.callbacks.Throughput(), batch_size=_ROWS, epochs=3)
    assert all(math.isnan(history[name][0]) for name in _NAMES)
    assert all(history["steps_per_second"][epoch] > 0 and history["step_ms_p99"][epoch] > 0 for epoch in (1, 2))


def test_what_comes_after_it_has_its_logs(tmp_path: Path) -> None:
    _fit(_model(), tfrep.callbacks.Throughput(), keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        assert {*_NAMES, "epoch", "loss"} <= set(next(csv.reader(file)))


def test_the_step_is_compiled_once_and_works_without() -> None:
    model, throughput = _model(), tfrep.callbacks.Throughput()
    _fit(model, throughput)
    measured = model.train_function
    again = tfrep.callbacks.Throughput()
    second = _fit(model, again)
    assert model.train_function is measured
    _check_examples(second)
    assert len(throughput.epochs) == len(again.epochs) == 2
    assert model.train_on_batch(_X, _Y) > 0
    assert set(_fit(model)) == {"loss"}
    model.evaluate(_X, _Y, verbose=0, callbacks=[again])
    assert len(again.epochs) == 2


def test_it_changes_no_weight() -> None:
    weights = []
    for callbacks in ([], [tfrep.callbacks.Throughput()]):
        keras.utils.set_random_seed(1)
        model = _model()
        _fit(model, *callbacks)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_loop_of_ones_own(distributed: bool) -> None:
    """Each batch but the first counts, and so does what the loop waits for data, which is made to be long."""
    throughput, strategy = tfrep.callbacks.Throughput(), tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def slowly(i: tf.Tensor) -> tf.Tensor:
        tf.py_function(lambda: time.sleep(0.05), [], [])
        return tf.range(i, i + 4)

    data = tf.data.Dataset.range(0, 40, 4).map(slowly, num_parallel_calls=1).prefetch(0)
    with strategy.scope():
        if distributed:
            data = strategy.experimental_distribute_dataset(data)
        steps = sum(1 for _ in throughput.reading(data))
        for _ in throughput.reading([(np.ones([3, 1]), np.ones(3))] * 4):
            time.sleep(0.01)
        for i, _ in enumerate(throughput.reading(range(9))):
            if i == 4:
                break
    slow, fast, broken = throughput.epochs
    assert steps == 10
    assert slow["examples_per_second"] / slow["steps_per_second"] == pytest.approx(4)
    assert fast["examples_per_second"] / fast["steps_per_second"] == pytest.approx(3)
    assert broken["examples_per_second"] / broken["steps_per_second"] == pytest.approx(1)
    assert slow["data_wait"] > 0.5 > fast["data_wait"]
    assert set(slow) == set(_NAMES)
