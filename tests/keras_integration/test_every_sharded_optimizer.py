"""Every optimizer with sharded state: the answer of one device, and files as if nothing was sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from sharded_training import (
    OPTIMIZERS,
    after_two_epochs,
    go_on,
    in_scope,
    mirrored,
    on_one_device,
    same,
    save,
    sharded,
    trained,
)

pytestmark = pytest.mark.lane("sharded_every")

CREWS = [("tf", 2), ("tf", 3), ("horovod", 3), ("shared_memory", 2), ("shared_memory", 3)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_mirrored_replicas(name: str, size: int) -> None:
    with mirrored(size).scope():
        found = trained(name)
    same(found, on_one_device(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("communicator", "size"), CREWS)
def test_processes(name: str, communicator: str, size: int, worker_pool: Any) -> None:
    for found in worker_pool(communicator, size).run(in_scope, name, meanwhile=lambda: on_one_device(name)):
        same(found, on_one_device(name))


def traffic(strategy: Any, steps: int) -> list[int]:
    """Returns the bytes that went over the loopback interface in some steps: with whole state, and with sharded state."""
    found = []
    x, y = np.ones((8, 1000), "float32"), np.ones((8, 1000), "float32")
    for each in (strategy, sharded(strategy)):
        with each.scope():
            model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
            model.compile(keras.optimizers.Adam(0.01), "mse")
            model.fit(x, y, batch_size=8, verbose=0)
            each.communicator.barrier()
            before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            for _ in range(steps):
                model.train_on_batch(x, y)
            each.communicator.barrier()
            found.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
    return found


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_as_many_bytes_travel_as_without(communicator: str, worker_pool: Any) -> None:
    steps, num_bytes = 5, 1_001_000 * 4
    plain, parted = worker_pool(communicator, 2).run(traffic, steps)[0]
    assert plain >= steps * 2 * num_bytes * 0.99
    assert parted < 1.25 * plain  # Other programs use the loopback interface, too. An all-reduce and a gather would be 1.5.


def save_in_scope(strategy: Any, *args: Any) -> None:
    with sharded(strategy).scope():
        save(*args)


def go_on_in_scope(strategy: Any, shards: bool, *args: Any) -> list[np.ndarray]:
    with (sharded(strategy) if shards else strategy).scope():
        return go_on(*args)


WAYS = ["model", "weights", "checkpoint", "backup"]


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "accumulation", "loss_scale"])
@pytest.mark.parametrize("way", WAYS)
def test_files_of_two_processes_go_on_anywhere(way: str, name: str, worker_pool: Any, tmp_path: Path) -> None:
    args = [str(tmp_path), way, name]
    worker_pool("tf", 2).run(save_in_scope, *args)
    expected = after_two_epochs(name)
    if way != "backup":  # It is removed when training ends.
        same(go_on(*args), expected)
        with mirrored(3).scope():
            same(go_on(*args), expected)
        for found in worker_pool("tf", 2).run(go_on_in_scope, False, *args):
            same(found, expected)
    for found in worker_pool("tf", 3).run(go_on_in_scope, True, *args):
        same(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_files_of_one_device_go_on_in_parts(way: str, worker_pool: Any, tmp_path: Path) -> None:
    save(str(tmp_path), way, "Adam")
    for found in worker_pool("horovod", 2).run(go_on_in_scope, True, str(tmp_path), way, "Adam"):
        same(found, after_two_epochs("Adam"))


@pytest.mark.parametrize("way", WAYS)
def test_files_of_mirrored_replicas_go_on_with_one_device(way: str, tmp_path: Path) -> None:
    with mirrored(2).scope():
        save(str(tmp_path), way, "Lamb")
    same(go_on(str(tmp_path), way, "Lamb"), after_two_epochs("Lamb"))


def test_xla(worker_pool: Any) -> None:
    with mirrored(2).scope():
        same(trained("Adam", jit_compile=True), on_one_device("Adam"))


def outside_replicas(strategy: Any) -> list[np.ndarray]:
    """Applies gradients in a loop that was written for one device."""
    with sharded(strategy).scope():
        return by_hand()


def by_hand() -> list[np.ndarray]:
    variable = tf.Variable([1.0, 2.0, 3.0])
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    return [variable.numpy(), *(v.numpy() for v in optimizer.variables)]


@pytest.mark.filterwarnings("ignore:An optimizer is applied outside")
def test_a_loop_outside_replicas(worker_pool: Any) -> None:
    expected = by_hand()
    with mirrored(2).scope():
        same(by_hand(), expected)
    for found in worker_pool("tf", 2).run(outside_replicas):
        same(found, expected)
