"""Where predictions are kept, and how often Keras's functions are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep

BOTH = pytest.mark.parametrize("communicator", ["tf", "horovod"])
X = np.arange(70, dtype=np.float32).reshape(35, 2)


def model_of_two() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((2,))
    return keras.Model(inputs, {"sum": keras.layers.Dense(1)(inputs), "more": keras.layers.Dense(3)(inputs)})


def _predict(strategy: Any) -> Any:
    with strategy.scope():
        model = model_of_two()
    everywhere = model.predict(X, batch_size=8, verbose=0)
    strategy.extended.predictions_on_chief_only = True
    try:
        on_chief = model.predict(X, batch_size=8, verbose=0)
        one_batch = model.predict_on_batch(X[:5])
    finally:
        strategy.extended.predictions_on_chief_only = False
    return everywhere, on_chief, one_batch


@BOTH
def test_only_the_chief_keeps_predictions(communicator: str, worker_pool: Callable[..., Any]) -> None:
    expected = model_of_two().predict(X, batch_size=8, verbose=0)
    for rank, (everywhere, on_chief, one_batch) in enumerate(worker_pool(communicator, 2).run(_predict)):
        for name, values in expected.items():
            np.testing.assert_allclose(everywhere[name], values, rtol=1e-5)
            rows, few = (values, values[:5]) if rank == 0 else (values[:0], values[:0])
            assert on_chief[name].shape == rows.shape
            assert on_chief[name].dtype == values.dtype
            np.testing.assert_allclose(on_chief[name], rows, rtol=1e-5)
            np.testing.assert_allclose(one_batch[name], few, rtol=1e-5)


class Counted(keras.Model):
    """Counts how often its steps are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.traced = keras.layers.Dense(1), {"train": 0, "test": 0, "predict": 0}

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, *args: Any) -> Any:
        self.traced["train"] += 1
        return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        self.traced["test"] += 1
        return super().test_step(*args)

    def predict_step(self, *args: Any) -> Any:
        self.traced["predict"] += 1
        return super().predict_step(*args)


def _traces(strategy: Any) -> list[tuple[int, ...]]:
    """Returns how often each step has been traced after each batch. The last has 3 rows, the others 8."""
    with strategy.scope():
        model = Counted()
        model.compile("sgd", "mse")
    counts: list[tuple[int, ...]] = []

    def note(batch: int, logs: Any) -> None:
        counts.append(tuple(model.traced.values()))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    callback.on_test_batch_end = callback.on_predict_batch_end = note
    y = X[:, :1]
    model.fit(X, y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    model.evaluate(X, y, batch_size=8, verbose=0, callbacks=[callback])
    model.predict(X, batch_size=8, verbose=0, callbacks=[callback])
    return counts


def _check(counts: list[tuple[int, ...]]) -> None:
    assert len(counts) == 20  # Two epochs, an evaluation, and a prediction, with 5 batches each.
    for step, first in ((0, 0), (1, 10), (2, 15)):
        assert counts[first][step] > 0
        assert {count[step] for count in counts[first:]} == {counts[first][step]}


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_traced_again_for_the_last_batch(replicas: int) -> None:
    _check(_traces(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])))


@BOTH
def test_processes_trace_nothing_again(communicator: str, worker_pool: Callable[..., Any]) -> None:
    for counts in worker_pool(communicator, 2).run(_traces):
        _check(counts)
