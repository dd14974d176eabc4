"""`ParameterServerReplicator` on a real cluster of one worker and one server; collectives are refused there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_support import data, run

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.lane("servers")


def _refused(what: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        what()
    return str(caught.value)


def _steps_on_workers() -> None:
    with tfrep.local_cluster(workers=1, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster)
        with tfrep.ParameterServerReplicator(strategy) as repl:
            x, y = data(12)

            def input_fn(ctx: Any) -> tf.data.Dataset:
                return tf.data.Dataset.from_tensor_slices((x, y)).batch(ctx.get_per_replica_batch_size(4))

            with repl.context():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1))
            before = model.get_weights()

            def step_fn(batch: Any) -> Any:
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return {"loss": loss}

            losses = repl.run(step_fn, input_fn, steps=3)
            kernel, bias = before
            for i, found in enumerate(losses):  # One worker: the updates of one device, one after the other.
                xs, ys = x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]
                error = xs @ kernel + bias - ys
                np.testing.assert_allclose(found["loss"], (error**2).mean(), rtol=1e-4)
                kernel = kernel - 0.1 * 2 * xs.T @ error / 4
                bias = bias - 0.1 * 2 * error.mean(0)
            np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-4, atol=1e-6)
            mean = repl.reduce(losses, "mean")["loss"]
            np.testing.assert_allclose(mean, np.mean([found["loss"] for found in losses]), rtol=1e-5)
            assert "wrap it once" in _refused(lambda: repl.wrap_optimizer(optimizer))
            assert "do not wait for each other" in _refused(lambda: repl.run(lambda: tfrep.all_sum(tf.ones([]))))
        assert "shut down" in _refused(lambda: repl.run(step_fn, input_fn))


def test_steps_on_workers(tmp_path: Path) -> None:
    run(_steps_on_workers, folder=tmp_path)
