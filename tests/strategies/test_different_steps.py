"""Ranks that trace different steps are told so before one of them runs; no rank waits for one that traces nothing."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
from lanes import in_lane
from workers import WorkerFailure


def _train(strategy: Any, how: str) -> None:
    class Model(keras.Sequential):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            loss = keras.ops.mean((y - y_pred) ** 2)
            if how == "another program":
                return keras.ops.sqrt(loss) if strategy.rank else loss
            if how == "other inputs":
                return loss / keras.ops.sum(y) if strategy.rank else keras.ops.sum(y) / loss
            return loss + float(strategy.rank)

    with strategy.scope():
        model = Model([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd")
    rows = np.ones((8, 4), "float32")
    model.fit(rows, rows[:, :1], batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("communicator", "how", "words"),
    [
        ("tf", "another program", ["Sqrt at "]),
        ("tf", "other inputs", ["RealDiv at "]),
        *in_lane("faults", ("horovod", "another constant", ["the constant 0. at ", "the constant 1. at "])),
    ],
)
def test_different_steps_are_refused(worker_pool: Any, communicator: str, how: str, words: list[str]) -> None:
    with pytest.raises(WorkerFailure) as caught:
        worker_pool(communicator, 2).run(_train, how)
    text = str(caught.value)
    assert "DesyncError: Ranks 0, 1 have different steps." in text
    assert all(f"{word}{__file__}" in text for word in words), text


def _compare(strategy: Any) -> float:
    compare = strategy.communicator.check_program
    compare("of both", b"same", lambda: [])
    began = time.monotonic()
    if strategy.rank == 1:
        compare("of one", b"any", lambda: [])
    seconds = time.monotonic() - began
    strategy.communicator.barrier()
    if strategy.rank == 0:
        compare("of one", b"any", lambda: [])
    compare("of both", b"same", lambda: [])
    return seconds


def test_no_rank_waits_for_one_that_compares_nothing(worker_pool: Any) -> None:
    assert max(worker_pool("tf", 2).run(_compare)) < 20.0
