"""Checkpoints that are read before what they restore is made, as TensorFlow's guides do it: "Delayed restorations"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("callbacks")

ROWS = np.random.RandomState(0).randn(37, 6).astype("float32")
TARGETS = np.tanh(ROWS[:, :1])
KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "accumulators": {"gradient_accumulation_steps": 2},
    "averages": {"use_ema": True, "ema_momentum": 0.8},
    "model": {},
}


def _net(is_built: bool) -> keras.Sequential:
    inputs = [keras.Input((6,))] if is_built else []
    return keras.Sequential([*inputs, layers.Dense(5, "tanh", name="hidden"), layers.Dense(1, name="out")])


def _trained_in_a_loop(strategy: Any, folder: str, kind: str) -> list[float]:
    """Trains for an epoch in a loop of its own, begins the program anew, which restores, and trains for another."""
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((ROWS, TARGETS)).batch(16))
    for _ in range(2):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = _net(is_built=kind != "model"), keras.optimizers.Adam(0.02, **KINDS[kind])
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        manager = tf.train.CheckpointManager(checkpoint, folder, 3)
        checkpoint.restore(manager.latest_checkpoint)

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean(tf.square(model(x, training=True) - y), -1)
                loss = tf.nn.compute_average_loss(errors, global_batch_size=16)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def train(x: Any, y: Any, step: Any = step) -> Any:
            return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)

        losses = [float(train(x, y)) for x, y in data]
        manager.save()
    return losses


def _evaluated(strategy: Any, folder: str) -> list[float]:
    """Restores into a model that `evaluate`, or `fit`, makes."""
    path = f"{folder}/net"
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = _net(is_built=False)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)
        tf.train.Checkpoint(net=model).write(path)
        found = []
        for method in ("evaluate", "fit"):
            restored = _net(is_built=False)
            tf.train.Checkpoint(net=restored).read(path)
            restored.compile(keras.optimizers.SGD(0.1), "mse")
            if method == "fit":
                restored.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)
            found.append(restored.evaluate(ROWS, TARGETS, batch_size=16, verbose=0))
        return found


def _with_sharded_slots(strategy: Any, folder: str) -> list[float]:
    from tfrep_strategy.strategies.groups import remember

    sharded = tfrep.MultiWorkerStrategy(strategy.communicator.name, shard_optimizer_state=True)
    try:
        return _trained_in_a_loop(sharded, folder, "slots")
    finally:
        remember(strategy)


def test_loops_go_on_with_sharded_slots(worker_pool: Any, tmp_path: Path) -> None:
    expected = _trained_in_a_loop(tf.distribute.get_strategy(), str(tmp_path / "one"), "slots")
    mirrored = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], shard_optimizer_state=True)
    np.testing.assert_allclose(_trained_in_a_loop(mirrored, str(tmp_path / "mirrored"), "slots"), expected, rtol=1e-5)
    for found in worker_pool("tf", 2).run(_with_sharded_slots, str(tmp_path / "processes")):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_loops_go_on(kind: str, worker_pool: Any, tmp_path: Path) -> None:
    expected = _trained_in_a_loop(tf.distribute.get_strategy(), str(tmp_path / "one"), kind)
    mirrored = _trained_in_a_loop(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), str(tmp_path / "mirrored"), kind)
    np.testing.assert_allclose(mirrored, expected, rtol=1e-5)
    for found in worker_pool("tf", 2).run(_trained_in_a_loop, str(tmp_path / "processes"), kind):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_models_that_are_made_late(worker_pool: Any, tmp_path: Path) -> None:
    expected = _evaluated(tf.distribute.get_strategy(), str(tmp_path / "one"))
    mirrored = _evaluated(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), str(tmp_path / "mirrored"))
    np.testing.assert_allclose(mirrored, expected, rtol=1e-5)
    for found in worker_pool("tf", 2).run(_evaluated, str(tmp_path / "processes")):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
