"""The device that a process is told to use."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError


def use_named_devices(first: Any) -> tuple[list[float], list[Any], list[str]]:
    communicator = first.communicator.name
    sums, said = [], []
    for device in ("CPU:0", "/cpu:0", "/device:CPU:0"):
        strategy = tfrep.MultiWorkerStrategy(communicator, device=device)
        assert [tf.DeviceSpec.from_string(name).device_type for name in strategy.extended.worker_devices] == ["CPU"]
        sums.append(float(strategy.run(lambda: tfrep.all_sum(float(first.rank)))))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.25), "mse")
    model.fit(np.ones((4, 2)), np.array([1, 2, 3, 4]), batch_size=4, verbose=0)
    for device in ("CPU:9", "GPU:7", "nonsense"):
        with pytest.raises(ConfigurationError) as error:
            tfrep.MultiWorkerStrategy(communicator, device=device)
        said.append(str(error.value))
    sums.append(float(strategy.run(lambda: tfrep.all_sum(float(first.rank)))))
    return sums, model.get_weights()[0].tolist(), said


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_the_device_of_a_process(communicator: str, worker_pool: Any) -> None:
    """Any spelling names it. One that does not exist is refused on all ranks, which can talk on."""
    for sums, kernel, said in worker_pool(communicator, 2).run(use_named_devices):
        assert sums == [1.0] * 4
        np.testing.assert_allclose(kernel, [[1.25], [1.25]])  # 0.25 * 2 * mean(y)
        assert all("There is no device" in text and "this process has CPU:0" in text for text in said)
        assert len(said) == 3
