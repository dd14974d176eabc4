"""Steps of real strategies are compared while they run: healthy ones differ nowhere, and faulty ones where the fault is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane
from partitioner import wrong_rules
from strategies.own_functions import PROGRAMS, ran

import tfrep_strategy as tfrep

L = keras.layers
_STEPS = 2


@contextmanager
def _verifying(folder: Path) -> Iterator[None]:
    os.environ.update(TFREP_VERIFY_DIR=str(folder), TFREP_VERIFY_STEPS=str(_STEPS), TFREP_VERIFY_FULL="1")
    try:
        yield
    finally:
        for name in ("DIR", "STEPS", "FULL"):
            del os.environ[f"TFREP_VERIFY_{name}"]


def _told(folder: Path) -> list[Any]:
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("told*.json"))]


def _fit() -> None:
    """Trains a model that has a bit of all: dropout, statistics of the batch, a loop, a nested function, a short last batch."""
    keras.utils.set_random_seed(4)
    rows = np.random.default_rng(4).normal(size=(13, 5, 3)).astype("float32")
    inputs = keras.Input((5, 3))
    x = L.SimpleRNN(4, return_sequences=True, name="loop")(inputs)
    x = L.BatchNormalization(name="normalized")(L.Conv1D(4, 2, name="convolved")(x))
    x = L.Dropout(0.3, name="dropped")(L.Activation("relu")(x))
    x = L.Lambda(tf.function(lambda x: x * tf.reduce_mean(x)), name="nested")(x)
    model = keras.Model(inputs, L.Dense(1, name="told")(L.GlobalMaxPooling1D()(x)))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=["mae"])
    model.fit(rows, rows[:, 0, :1], batch_size=8, epochs=1, verbose=0, shuffle=False)


def _fit_small() -> None:
    rows = np.random.default_rng(4).normal(size=(13, 3)).astype("float32")
    model = keras.Sequential([L.Dense(4, "relu"), L.BatchNormalization(), L.Dropout(0.3, seed=1), L.Dense(1)])
    model.compile("adam", "mse")
    model.fit(rows, rows[:, :1], batch_size=8, verbose=0)


def _loop() -> None:
    """Takes steps of a function of its own."""
    weights = tf.Variable(tf.ones([3, 2]))

    @tfrep.partition
    def step(rows: tf.Tensor) -> tf.Tensor:
        noise = tf.random.normal([8, 3])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(rows @ weights)) + tf.reduce_sum(tf.reduce_max(noise @ weights, axis=1))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for size in (8, 8, 5):
        step(tf.random.stateless_normal([size, 3], [1, size]))


def _check_healthy(folder: Path, functions: int, tensors: int) -> None:
    told = _told(folder)
    assert not [each["finding"] for each in told if each["finding"]]
    assert not [each["alone"] for each in told if each["alone"]]
    assert len({each["step"] for each in told}) >= functions
    assert max(each["compared"] for each in told) > tensors
    assert any(each["draws"] for each in told), "the loop draws without a seed"


@pytest.mark.parametrize("programs", [(), *in_lane("functions_mirrored", (tuple(PROGRAMS),))])
def test_healthy_mirrored_replicas(programs: tuple[str, ...], tmp_path: Path) -> None:
    with _verifying(tmp_path), tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        _fit()
        _loop()
        for name in programs:
            ran(name, tfrep.partition)
    _check_healthy(tmp_path, 2 + len(programs), tensors=400)


def _in_process(strategy: Any, folder: str, programs: list[str]) -> None:
    with _verifying(Path(folder)), strategy.scope():
        (_fit if programs else _fit_small)()
        _loop()
        for name in programs:
            ran(name, tfrep.partition)


@pytest.mark.parametrize(
    ("communicator", "programs"), [("tf", []), *in_lane("functions_processes", ("tf", ["physics", "gan"]), ("horovod", []))]
)
def test_healthy_processes(communicator: str, programs: list[str], worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(communicator, 2).run(_in_process, str(tmp_path), programs)
    _check_healthy(tmp_path, 3 + len(programs), tensors=200)


def _fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in wrong_rules.TALK:
        wrong_rules.misled(monkeypatch, wrong_rules.TALK[name], 0)
    elif name == "an update is lost":
        wrong_rules.with_an_update_lost(monkeypatch)
    elif name == "draws of other rows":
        wrong_rules.with_draws_from_the_start(monkeypatch)
    else:
        wrong_rules.mutated(monkeypatch, wrong_rules.MUTATIONS[name], ["BiasAddGrad", "MatMul"])


@pytest.mark.parametrize(
    ("fault", "what", "layer"),
    [
        ("a mean is taken for a sum", "", "normalized"),
        *in_lane(
            "functions_mirrored",
            ("an update is lost", "Assign", "adam"),
            ("draws of other rows", "StatelessRandomUniformV2", "dropped"),
            ("a sum is taken for a whole", "MatMul", "gradient_tape"),
            ("a copy is stale", "", "normalized"),
            ("a part is lost", "", "normalized"),
        ),
    ],
)
def test_a_fault_in_a_fit(fault: str, what: str, layer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fault(fault, monkeypatch)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with _verifying(tmp_path), strategy.scope(), pytest.raises(tf.errors.OpError, match="A step differs from that of one device"):
        _fit()
    (finding,) = [each["finding"] for each in _told(tmp_path) if each["finding"]]
    assert finding["what"].startswith(what)
    assert layer in finding["layer"]
    assert "test_verified_runs.py" in finding["line"]


def test_a_loop_that_draws_hides_what_it_writes_and_not_what_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody can repeat the loop, nor tell what it has written. The update behind it is wrong alike on all replicas."""
    wrong_rules.with_updates_twice(monkeypatch)
    with _verifying(tmp_path), tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        weights, count = tf.Variable(tf.ones([3])), tf.Variable(0.0)

        @tfrep.partition
        def step(rows: tf.Tensor) -> tf.Tensor:
            total = tf.zeros([])
            for _ in tf.range(3):
                total += tf.reduce_sum(rows * weights + tf.random.normal([3]))
                count.assign_add(1.0)
            weights.assign_add(tf.ones([3]))
            return total

        with pytest.raises(tf.errors.OpError, match="A step differs from that of one device"):
            step(tf.ones([4, 3]))
    assert "Assign" in _told(tmp_path)[-1]["finding"]["what"]
