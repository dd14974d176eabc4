"""`assert_in_sync` names what differs, and where."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane
from packaging.version import Version
from raising import refuses
from scenarios import dense, regression

import tfrep_strategy as tfrep
from tfrep_strategy.errors import DesyncError
from tfrep_strategy.strategies.in_sync import checksum, compare

pytestmark = pytest.mark.lane("quick")


def _trained(strategy: Any, callbacks: Any = ()) -> keras.Model:
    with strategy.scope():
        model = dense()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    model.fit(*regression(), batch_size=16, epochs=2, verbose=0, callbacks=list(callbacks))
    return model


def _copy(strategy: Any, variable: Any, replica: int) -> Any:
    """The copy of a Keras variable that a replica of this process has."""
    value = variable.value
    return value.values[replica - strategy.extended.first_local_replica] if hasattr(value, "values") else value


def _spoil(strategy: Any, variable: Any, replica: int) -> None:
    first = strategy.extended.first_local_replica
    if first <= replica < first + strategy.extended.num_local_replicas:
        copy = _copy(strategy, variable, replica)
        copy.assign(tf.tensor_scatter_nd_add(copy, [[0] * copy.shape.rank], [tf.constant(1e-6, copy.dtype)]))


class SpoilAt(keras.callbacks.Callback):
    def __init__(self, strategy: Any, batch: int) -> None:
        super().__init__()
        self.strategy, self.batch, self.done = strategy, batch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.done += 1
        if self.done == self.batch:
            _spoil(self.strategy, self.model.layers[-1].bias, 1)


def _check(strategy: Any) -> dict[str, Any]:
    """Everything that can be asked of one strategy; what is raised is returned as text."""
    model = _trained(strategy)
    strategy.assert_in_sync(model)
    found: dict[str, Any] = {}
    for name, variable in (("weight", model.layers[0].kernel), ("slot", model.optimizer.variables[-1])):
        before = [_copy(strategy, variable, strategy.extended.first_local_replica + i).numpy()
                  for i in range(strategy.extended.num_local_replicas)]  # fmt: skip
        _spoil(strategy, variable, 1)
        found[name] = _error(lambda: strategy.assert_in_sync(model))
        found[f"{name}_path"] = variable.path
        for i, value in enumerate(before):
            _copy(strategy, variable, strategy.extended.first_local_replica + i).assign(value)
        strategy.assert_in_sync([variable])
    spoiler = SpoilAt(strategy, 3)
    strategy.assert_in_sync(model, every=4)
    try:
        found["every"] = _error(lambda: _trained(strategy, [spoiler]))
    finally:
        strategy.check_sync_every = None
    found["batches"] = spoiler.done
    if Version(keras.__version__) >= Version("3.16.dev"):  # It asks for a batch before a step.
        return found
    # The step that finds the end of the data may have done a part of its work on some replicas.
    data = tf.data.Dataset.from_tensor_slices(regression()).batch(16).filter(lambda x, y: True)
    spoiler = SpoilAt(strategy, 3)
    model.fit(data, epochs=1, verbose=0, callbacks=[spoiler])
    strategy.assert_in_sync(model)
    found["until the end"] = spoiler.done
    return found


def _error(fn: Any) -> str:
    try:
        fn()
    except DesyncError as error:
        return str(error)
    return "none"


def _verify(found: dict[str, Any]) -> None:
    for name in ("weight", "slot"):
        text = found[name]
        assert text.startswith(f"Variable {found[f'{name}_path']!r} differs between the replicas.")
        lines = text.splitlines()
        assert lines[1].startswith("  replica 0: sum ")
        assert lines[2].startswith("  replica 1: sum ")
        assert lines[1][11:] != lines[2][11:]
    assert "bias" in found["every"]
    assert found.get("until the end", 3) == 3
    assert found["batches"] == 3  # The fourth step's check raised before its callbacks ran.


def test_mirrored() -> None:
    _verify(_check(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])))


@pytest.mark.parametrize("communicator", [*in_lane("short", "tf"), *in_lane("transports", "horovod")])
def test_processes(worker_pool: Any, communicator: str) -> None:
    results = worker_pool(communicator, 2).run(_check)
    assert results[0] == results[1]
    _verify(results[0])


def test_one_bit_is_enough() -> None:
    value = np.ones([3], "float32")
    other = np.nextafter(value, 2, dtype="float32")
    with refuses(DesyncError, "TFREP-E022", told=["'kernel'"]):
        compare([[checksum("kernel", value)], [checksum("kernel", other)]])


def test_not_a_number_is_equal_to_itself() -> None:
    value = np.array([np.nan, 1.0])
    compare([[checksum("kernel", value)], [checksum("kernel", value.copy())]])


def test_strings_and_numbers_of_variables() -> None:
    compare([[checksum("s", np.array([b"a"], object))], [checksum("s", np.array([b"a"], object))]])
    with refuses(DesyncError, "TFREP-E022", held=[0, 1]):
        compare([[], [checksum("kernel", np.ones(2))]])


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_checks_come_after_whole_numbers_of_steps(every: Any) -> None:
    with refuses(every=every):
        tfrep.MirroredStrategy(["CPU:0"]).assert_in_sync([], every)
