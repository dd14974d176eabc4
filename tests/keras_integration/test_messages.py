"""How much ranks tell each other in `fit`: what callbacks cost each batch and each epoch, with many variables too."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.peers.checked import CheckedCommunicator
from tfrep_strategy.communicators.peers.monitor import PeerMonitor
from tfrep_strategy.strategies.process_extended import ProcessExtended

pytestmark = pytest.mark.lane("callbacks")

ROWS = 32
LAYERS = 3
_Counts = collections.Counter[str]


class SeesBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen = {**getattr(self, "seen", {}), batch: logs["mae"]}


class StopsAlone(keras.callbacks.Callback):
    """Stops on one rank only, in the second batch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.batches = rank, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.rank == 1 and batch == 1:
            self.model.stop_training = True


@contextlib.contextmanager
def counting(counts: _Counts) -> Iterator[None]:
    """Counts collectives that Python calls between steps: those that are reported to rank 0, and those in functions."""

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    report, init = PeerMonitor.report, ProcessExtended.any_process
    summed, objects = ProcessExtended.summed_at_once, CheckedCommunicator.all_gather_object
    PeerMonitor.report = counted("reports", report)  # type: ignore[method-assign]
    ProcessExtended.any_process = counted("wishes", init)  # type: ignore[method-assign]
    ProcessExtended.summed_at_once = counted("sums", summed)  # type: ignore[method-assign]
    CheckedCommunicator.all_gather_object = counted("objects", objects)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PeerMonitor.report, ProcessExtended.any_process = report, init  # type: ignore[method-assign]
        ProcessExtended.summed_at_once, CheckedCommunicator.all_gather_object = summed, objects  # type: ignore[method-assign]


def fit(strategy: Any, callbacks: list[Any], batch_size: int, epochs: int = 1, synchronized: bool = False) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(synchronized=synchronized) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae", "mape"])
    x = np.random.RandomState(0).rand(ROWS, 4).astype("float32")
    model.fit(x, x[:, :1], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def count(strategy: Any, make: Any, *args: Any) -> _Counts:
    counts: _Counts = collections.Counter()
    with counting(counts):
        fit(strategy, make(strategy), *args)
    return counts


def costs(strategy: Any, folder: str) -> dict[str, dict[str, _Counts]]:
    """Returns what 8 batches cost more than 4, and what two epochs cost more than one."""
    cases = {
        "none": lambda s: [],
        "batches": lambda s: [SeesBatches()],
        "saves": lambda s: [keras.callbacks.ModelCheckpoint(f"{folder}/a.weights.h5", save_freq=1000, save_weights_only=True)],
        "epochs": lambda s: [keras.callbacks.LearningRateScheduler(lambda e, r: r), keras.callbacks.EarlyStopping("loss")],
    }
    found = {}
    for name, make in cases.items():
        once = count(strategy, make, ROWS // 4)
        more, longer = count(strategy, make, ROWS // 8), count(strategy, make, ROWS // 4, 2)
        more.subtract(once)
        longer.subtract(once)
        found[name] = {"4 batches": +more, "an epoch": +longer}
    return found


def test_what_callbacks_cost(worker_pool: Any, tmp_path: Any) -> None:
    for rank in worker_pool("tf", 2).run(costs, str(tmp_path)):
        for name, cost in rank.items():
            # The end of an epoch: the ranks tell whether to stop. Moving statistics are the same everywhere.
            assert cost["an epoch"]["reports"] == 2, name
            assert cost["an epoch"]["objects"] == 2, name
        assert not rank["none"]["4 batches"]
        assert not rank["epochs"]["4 batches"]
        assert not rank["saves"]["4 batches"]
        assert rank["batches"]["4 batches"] == {"wishes": 4}


def stopped(strategy: Any) -> tuple[int, dict[int, float]]:
    alone, sees = StopsAlone(strategy.rank), SeesBatches()
    fit(strategy, [alone, sees], ROWS // 4, synchronized=True)
    return alone.batches, sees.seen


def test_a_wish_to_stop_ends_the_same_batch_everywhere(worker_pool: Any) -> None:
    one = SeesBatches()
    fit(tf.distribute.get_strategy(), [one], ROWS // 4, synchronized=True)
    for batches, seen in worker_pool("tf", 2).run(stopped):
        assert batches == 2
        assert list(seen) == [0, 1]
        np.testing.assert_allclose(list(seen.values()), [one.seen[0], one.seen[1]], rtol=1e-5)
