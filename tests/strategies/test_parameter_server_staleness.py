"""`sync=True` and `max_in_flight`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_support import data, dense_model, run
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("servers")

_WAKE = Path(__file__).with_name("scripts") / "wake.sh"


def _init(seed: int) -> Any:
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


def _larger_batch() -> None:
    def model() -> keras.Model:
        layers = [keras.Input((4,)), keras.layers.Dense(8, "relu", kernel_initializer=_init(1))]
        made = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer=_init(2))])
        made.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=["mae"])
        return made

    x, y = data(640)
    with tfrep.local_cluster(workers=2, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, sync=True)
        with strategy.scope():
            spread = model()
        single = model()
        got = spread.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
        expected = single.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        assert int(spread.optimizer.iterations) == 64
        for a, b in zip(spread.get_weights(), single.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["mae"], expected["mae"], rtol=1e-4)

        # 65 batches: the last one of an epoch makes an update of its own.
        spread.fit(*data(650), batch_size=10, verbose=0)
        assert int(spread.optimizer.iterations) == 64 + 33


def test_sync_updates_are_those_of_one_device_with_a_larger_batch(tmp_path: Path) -> None:
    run(_larger_batch, folder=tmp_path)


def _missing_gradients() -> None:
    def creator(map_fn: Callable[[Any], Any]) -> tfrep.DatasetCreator:
        return tfrep.DatasetCreator(lambda context: tf.data.Dataset.range(5).map(map_fn))

    def fails(i: tf.Tensor) -> Any:
        value = tf.debugging.check_numerics(1.0 / tf.cast(3 - i, "float32"), "!")
        return tf.fill([10, 4], value), tf.zeros([10, 1])

    x, y = data(640)
    with tfrep.local_cluster(workers=2, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, sync=True)
        with strategy.scope():
            model = dense_model()
        model.fit(creator(lambda i: (tf.ones([10, 4]), tf.ones([10, 1]))), steps_per_epoch=100, verbose=0)
        ended = int(model.optimizer.iterations)
        assert 3 <= ended <= 5, ended  # Each worker has five batches; over when the first has no more.
        model.fit(x, y, batch_size=10, verbose=0)
        assert int(model.optimizer.iterations) == ended + 32
        with pytest.raises(RuntimeError, match="check_numerics|Worker"):
            model.fit(creator(fails), steps_per_epoch=100, verbose=0)
        before = int(model.optimizer.iterations)
        model.fit(x, y, batch_size=10, verbose=0)
        assert int(model.optimizer.iterations) == before + 32


def test_sync_updates_wait_for_no_gradient_that_does_not_come(tmp_path: Path) -> None:
    """The data ends, or a worker fails; what follows makes its updates."""
    run(_missing_gradients, folder=tmp_path)


class Pair(keras.Model):
    """Two layers, each with an optimizer of its own."""

    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (keras.layers.Dense(1, kernel_initializer=_init(k)) for k in range(2))
        for layer in (self.one, self.two):
            layer.build((None, 4))
        self.built = True
        self.second = keras.optimizers.Adam(0.02)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            losses = {"one": keras.ops.mean((self.one(x) - y) ** 2), "two": keras.ops.mean((self.two(x) - 2 * y) ** 2)}
        for layer, optimizer in ((self.one, self.optimizer), (self.two, self.second)):
            gradients = tape.gradient(losses[("one", "two")[layer is self.two]], layer.trainable_variables)
            for _ in range(self.times):
                optimizer.apply(gradients, layer.trainable_variables)
        return losses


def _two_optimizers() -> None:
    x, y = data(640)
    with tfrep.local_cluster(workers=2, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, sync=True)
        with strategy.scope():
            spread = Pair()
            spread.compile(keras.optimizers.SGD(0.05), steps_per_execution=4)
        single = Pair()
        single.compile(keras.optimizers.SGD(0.05))
        spread.fit(x, y, batch_size=10, shuffle=False, verbose=0)
        single.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        assert int(spread.optimizer.iterations) == int(spread.second.iterations) == 32
        for a, b in zip(spread.get_weights(), single.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        spread.times = 2
        spread.make_train_function(force=True)
        with refuses(told=["sync=True"], variable=...):
            spread.fit(x, y, batch_size=10, verbose=0)


def test_sync_updates_of_two_optimizers_and_of_several_steps_in_one_execution(tmp_path: Path) -> None:
    run(_two_optimizers, folder=tmp_path)


def _slow_worker(mode: str, seconds: str) -> None:
    settings: dict[str, Any] = {
        "backup": {"sync": True, "replicas_to_aggregate": 1},
        "window": {"max_in_flight": 1},
        "free": {},
    }[mode]
    x, y = data(400)
    with tfrep.local_cluster(workers=2, servers=1) as resolver:
        strategy = tfrep.ParameterServerStrategy(resolver, **settings)
        with strategy.scope():
            model = dense_model()
        model.fit(x, y, batch_size=10, verbose=0)
        pid = resolver.cluster.pid("worker", 1)
        wakes = []

        class Watch(keras.callbacks.Callback):
            supports_remote_logs = True

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                print(batch, file=steps, flush=True)
                if batch == 10:
                    os.kill(pid, signal.SIGSTOP)
                    # Another process wakes the worker: this one may be the one that waits.
                    wakes.append(subprocess.Popen(["sh", str(_WAKE), str(pid), str(10 * int(seconds))]))

        with open("steps", "w") as steps:
            model.fit(x, y, batch_size=10, verbose=0, callbacks=[Watch()])
        wakes[0].wait()


def test_a_slow_worker_is_not_waited_for_with_a_backup_worker_but_with_a_window(tmp_path: Path) -> None:
    """A worker is stopped after step 10 of 40, until step 36 is handed out or some time has passed."""
    counts = {}
    for mode, seconds in (("backup", 40), ("window", 3), ("free", 40)):
        run(_slow_worker, mode, str(seconds), folder=tmp_path)
        assert len((tmp_path / "steps").read_text().split()) == 40
        counts[mode] = int((tmp_path / "handed_out").read_text())
    assert counts["window"] <= 14
    assert counts["backup"] >= 36
    assert counts["free"] >= 36
