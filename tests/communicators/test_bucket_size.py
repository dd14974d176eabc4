"""Buckets whose size is found by measuring, where that changes no bit or the user asks for it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.communicators.bucket_size import SMALLEST_BUCKET, bucket_for, find_bucket_bytes
from tfrep_strategy.strategies import process_extended

SIZES = [1 << power for power in range(20, 26)]


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        (0.001, 0.005, 8 << 20),  # 1 ms for a message, and as long for each MiB: ten of these, or the nearest power of two.
        (0.001, 0.002, 32 << 20),
        (0.0001, 0.1, 1 << 20),
        (0.001, 0.0009, 32 << 20),  # No time for a byte was seen.
        (0.0, 0.1, 1 << 20),
    ],
)
def test_a_bucket_takes_ten_times_as_long_as_a_message(short: float, long: float, expected: int) -> None:
    assert bucket_for(short, long) == expected


def test_what_is_found_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    alone = tfrep.communicators.SingleCommunicator()
    with caplog.at_level("INFO", "tfrep_strategy"):
        found = find_bucket_bytes(alone, alone.all_reduce)
    [line] = caplog.messages
    assert line.startswith(f"Gradients travel in buckets of {found >> 20} MiB. A sum of 4 MiB takes ")


def trained(strategy: Any, settings: list[Any], width: int = 700) -> list[tuple[int, int, list[np.ndarray]]]:
    """Trains with each setting. Returns the bucket that its gradients travelled in, how often it was found, and weights."""
    results, find = [], process_extended.find_bucket_bytes
    for setting in settings:
        mine, found = tfrep.MultiWorkerStrategy(strategy.communicator, bucket_bytes=setting), []

        def counted(*args: Any) -> int:
            found.append(find(*args))  # noqa: B023
            return found[-1]  # noqa: B023

        before = mine.communicator.bucket_bytes
        keras.utils.set_random_seed(1)
        with mine.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(width), keras.layers.Dense(width)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.RandomState(0).randn(22, 8).astype("float32")
        try:
            with mock.patch.object(process_extended, "find_bucket_bytes", counted):
                model.fit(x, np.tile(x[:, :1], width), batch_size=8, verbose=0)
            used = mine.extended.bucket_bytes_for(model.trainable_variables)
        finally:
            mine.communicator.bucket_bytes = before
        results.append((used, len(found), model.get_weights()))
    return results


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_two_replicas_find_their_bucket(communicator: str, worker_pool: Any) -> None:
    default = {"tf": 4 << 20}.get(communicator, 32 << 20)
    pool = worker_pool(communicator, 2)
    ranks = pool.run(trained, [None, 4096])
    assert ranks[0][0][0] == ranks[1][0][0]
    for (used, measured, weights), (fixed, never, expected) in ranks:
        assert used in SIZES
        assert measured == 1, "once, though three steps are traced for two sizes of batches"
        assert (fixed, never) == (4096, 0)
        for mine, theirs in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for ((used, measured, _),) in pool.run(trained, [None], 8):
        assert (used, measured) == (default, 0), f"all of it is less than {SMALLEST_BUCKET} bytes"


@pytest.mark.lane("wires")
@pytest.mark.parametrize(("communicator", "measures"), [("tf", False), ("shared_memory", True)])
def test_more_replicas_measure_where_no_bit_depends_on_it(communicator: str, measures: bool, worker_pool: Any) -> None:
    for (used, measured, _), (asked, as_asked, _) in worker_pool(communicator, 3).run(trained, [None, "measured"]):
        assert measured == measures
        assert used in (SIZES if measures else [4 << 20])
        assert asked in SIZES
        assert as_asked == 1
