"""Sharded optimizer state: the answer of one device, and a part of the memory. All optimizers are in another file."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane
from raising import refuses
from sharded_training import (
    OPTIMIZERS,
    fit,
    held,
    in_scope,
    made,
    mirrored,
    on_one_device,
    same,
    sharded,
    state,
    trained,
)

import tfrep_strategy as tfrep
from tfrep_strategy.strategies.variables import PartVariable


@pytest.mark.parametrize("name", ["Adam", *in_lane("sharded_training", "Muon", "loss_scale")])
def test_two_mirrored_replicas(name: str) -> None:
    with mirrored(2).scope():
        found = trained(name)
    same(found, on_one_device(name))


@pytest.mark.parametrize("communicator", ["tf", "shared_memory"])
def test_two_processes(communicator: str, worker_pool: Any) -> None:
    for found in worker_pool(communicator, 2).run(in_scope, "accumulation"):
        same(found, on_one_device("accumulation"))


def with_and_without(strategy: Any, name: str) -> bool:
    strategy.gradient_transformers = [list]  # Replicas trace the step, as with sharded state.
    try:
        with strategy.scope():
            whole = trained(name)
    finally:
        strategy.gradient_transformers = []
    return all(a.tobytes() == b.tobytes() for a, b in zip(in_scope(strategy, name), whole, strict=True))


@pytest.mark.lane("sharded_training")
@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_two_replicas_give_the_same_bits(communicator: str, worker_pool: Any) -> None:
    assert worker_pool(communicator, 2).run(with_and_without, "Adam") == [True, True]


def large(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, use_bias=i % 2 == 0) for i in range(6)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(optimizer, "mse")
    model.fit(np.ones((8, 64), "float32"), np.ones((8, 64), "float32"), batch_size=8, verbose=0)
    return model


def bytes_held(strategy: Any, name: str) -> list[int]:
    with sharded(strategy).scope():
        return held(large(OPTIMIZERS[name]()))


@pytest.mark.parametrize("name", ["Adam", *in_lane("sharded_training", "Lamb")])
def test_slots_take_their_part_of_the_memory(name: str, worker_pool: Any) -> None:
    names = ("velocity", "momentum")
    slots = [v for v in large(OPTIMIZERS[name]()).optimizer.variables if v.path.endswith(names)]
    whole = sum(v.numpy().nbytes for v in slots)
    assert whole >= 6 * 64 * 64 * 4
    with mirrored(2).scope():
        of_replicas = held(large(OPTIMIZERS[name]()))
    of_processes = [own for (own,) in worker_pool("tf", 2).run(bytes_held, name)]
    for found in (of_replicas, of_processes):
        assert whole <= sum(found) <= 1.02 * whole
        assert max(found) <= 1.02 * whole / len(found)


class Reads(keras.callbacks.Callback):
    """A callback of one rank, which reads the optimizer."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.total = sum(float(np.abs(v.numpy()).sum()) for v in self.model.optimizer.variables)


def wholes_held(strategy: Any, folder: str) -> tuple[float, list[bool]]:
    """Returns what the callback of rank 0 has read, and on which occasions this rank holds whole slots."""
    shards = sharded(strategy)
    with shards.scope():
        model = large("adam")
        reads = Reads()
        x = np.ones((8, 64), "float32")
        model.fit(x, x, batch_size=8, verbose=0, callbacks=[reads] if strategy.rank == 0 else [])
        variables = [v for v in shards.extended.replica_variables.values() if isinstance(v, PartVariable)]
        holds = [any(v.held is not None for v in variables)]
        with pytest.raises(ValueError, match="extension"):
            model.save(f"{folder}/model.unknown")
        holds.append(any(v.held is not None for v in variables))
    return getattr(reads, "total", 0.0), holds


def test_who_needs_whole_slots_holds_them(worker_pool: Any, tmp_path: Any) -> None:
    model = large("adam")
    x = np.ones((8, 64), "float32")
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[reads := Reads()])
    (total, of_0), (_, of_1) = worker_pool("tf", 2).run(wholes_held, str(tmp_path))
    assert total == pytest.approx(reads.total, rel=1e-5)
    assert of_0 == [True, False]
    assert of_1 == [False, False]


class Signs(keras.optimizers.Optimizer):
    """An optimizer of the user's own that looks at whole variables; `extra` gives it state of unknown meaning."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__(learning_rate=0.01)
        self._extra = extra

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.means = self.add_optimizer_variables(variables, "mean")
        if self._extra:
            self.count = self.add_variable((), name="count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        mean = self.means[self._get_variable_index(variable)]
        gradient = tf.convert_to_tensor(gradient)
        self.assign(mean, 0.9 * mean + gradient / (tf.norm(gradient) + 1.0))
        self.assign_sub(variable, learning_rate * mean)


@pytest.mark.lane("sharded_training")
def test_an_optimizer_of_ones_own() -> None:
    expected = made(Signs())
    fit(expected)
    with mirrored(3).scope():
        model = made(Signs())
        fit(model)
    same(state(model), state(expected))
    whole = sum(v.numpy().nbytes for v in expected.optimizer.variables if v.path.endswith("mean"))
    assert sum(held(model)) == whole


def test_state_of_unknown_meaning_is_refused() -> None:
    with mirrored(2).scope(), refuses(told=["=['signs", "/count']"], hint="make it with", state=...):
        fit(made(Signs(extra=True)))


def test_slots_look_whole_outside_replicas() -> None:
    with mirrored(2).scope():
        model = made(keras.optimizers.Adam(0.01))
        model.optimizer.build(model.trainable_variables)
        slot = next(v for v in model.optimizer.variables if tuple(v.shape) == (11, 5))
        value = np.arange(55, dtype="float32").reshape(11, 5)
        slot.assign(value)
        np.testing.assert_array_equal(slot.numpy(), value)
        np.testing.assert_array_equal((slot + 1.0).numpy(), value + 1.0)
        slot.assign_add(value)
        np.testing.assert_array_equal(slot.numpy(), 2 * value)
    assert slot.value.shape == (11, 5)
    assert [part.shape.num_elements() for part in slot.value.values] == [28, 28]


@pytest.mark.lane("sharded_training")
def test_gradients_that_somebody_looks_at_are_whole() -> None:
    shapes = []

    def seen(pairs: Any) -> Any:
        shapes.extend((tuple(g.shape), tuple(v.shape)) for g, v in pairs)
        return pairs

    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], gradient_transformers=[seen], shard_optimizer_state=True)
    with strategy.scope():
        found = trained("Adam")
    same(found, on_one_device("Adam"))
    assert shapes
    assert all(gradient == variable for gradient, variable in shapes)


def test_several_devices_of_a_replica_are_refused() -> None:
    with refuses(hint="leave out", shard_optimizer_state=True, devices_per_replica=2):
        tfrep.MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2, shard_optimizer_state=True)
