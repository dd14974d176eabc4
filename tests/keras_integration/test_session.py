"""Scripts that begin with `keras.utils.clear_session()` train on all replicas."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

import tfrep_strategy as tfrep


def cleared_and_trained(strategy: Any) -> tuple[str, int, list[float], bool]:
    gc.freeze()  # `clear_session` looks for garbage in all that this process ever made, which can take a minute.
    outside = tf.distribute.get_strategy()
    with strategy.scope():
        for _ in range(2):
            keras.backend.clear_session()
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            x = np.random.RandomState(0).randn(10, 3).astype("float32")
            history = model.fit(x, x[:, :1], batch_size=4, verbose=0)
        gc.unfreeze()
        found = model.layers[0].name, tf.distribute.get_strategy().num_replicas_in_sync, history.history["loss"]
    return *found, tf.distribute.get_strategy() is outside


@pytest.mark.lane("quick")
def test_one_process_stays_in_scope() -> None:
    name, replicas, loss, left = cleared_and_trained(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert (name, replicas, left) == ("dense", 2, True)
    np.testing.assert_allclose(loss, cleared_and_trained(tf.distribute.get_strategy())[2], rtol=1e-5)


@pytest.mark.parametrize("communicator", ["horovod", *in_lane("transports", "tf")])
def test_processes_stay_in_scope(communicator: str, worker_pool: Any) -> None:
    one_device = cleared_and_trained(tf.distribute.get_strategy())[2]
    for name, replicas, loss, left in worker_pool(communicator, 2).run(cleared_and_trained):
        assert (name, replicas, left) == ("dense", 2, True)
        np.testing.assert_allclose(loss, one_device, rtol=1e-5)
