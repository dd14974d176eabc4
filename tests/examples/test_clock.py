"""How long epochs take, and where."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.examples.clock import EpochClock, replica_devices

pytestmark = pytest.mark.lane("quick")


class _Slow(keras.callbacks.Callback):
    """Makes each epoch last, and what follows its last batch last longer."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.5)


def test_epochs_without_what_follows_them():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    clock = EpochClock()
    model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[_Slow(), clock])
    assert len(clock.seconds) == 3
    assert clock.seconds[1] >= 0.1
    assert clock.examples_per_second(4) < 4 / 0.1
    assert clock.examples_per_second(4) == pytest.approx(4 / np.median(clock.seconds[1:]))


def test_the_first_epoch_is_not_counted():
    clock = EpochClock()
    clock.seconds = [100.0, 2.0, 4.0, 2.0]
    assert clock.examples_per_second(10) == 5.0
    clock.seconds = [100.0]
    with pytest.raises(ConfigurationError, match="epochs=1"):
        clock.examples_per_second(10)


def test_devices_without_gpus():
    assert replica_devices(4) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]  # As many as the tests have.
    with pytest.raises(ConfigurationError, match="n=0"):
        replica_devices(0)
