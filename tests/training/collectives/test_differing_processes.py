"""Processes that bring what does not fit together: an error on each within seconds, and where all saw it, they go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("collectives")

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_gather": tfrep.all_gather,
    "all_reduce": tfrep.all_sum,
    "all_to_all": tfrep.all_to_all,
    "broadcast": tfrep.broadcast,
    "reduce_scatter": tfrep.reduce_scatter,
    "stock all_reduce": lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x),
    "stock all_gather": lambda x: tf.distribute.get_replica_context().all_gather(x, 0),
}
RECOVERS = ("all_gather", "all_to_all", "stock all_gather")
"""What finds differences out before it begins, over TensorFlow's collectives in functions."""


def _brought(rank: int, how: str) -> Any:
    shapes = {"columns": [2, 3 + rank], "turned": [2, 6] if rank else [6, 2], "dimensions": [2] * (2 + rank)}
    return tf.ones(shapes.get(how, [2, 2]), tf.int32 if how == "dtype" and rank else tf.float32)


def differ(strategy: Any, name: str, mode: str, hows: list[str]) -> list[Any]:
    """Returns, for each way to differ, the error, the seconds that it took, and what a collective gives afterwards."""
    seen = []
    for how in hows:
        x = _brought(strategy.rank, how)
        signature = [tf.TensorSpec([None] * x.shape.rank, x.dtype)] if mode == "dynamic" else [tf.TensorSpec(x.shape, x.dtype)]
        call = lambda x: strategy.run(COLLECTIVES[name], (x,))  # noqa: E731
        run = call if mode == "eager" else tf.function(call, signature, autograph=False)
        began = time.monotonic()
        try:
            run(x)
            error = "none"
        except (tfrep.errors.DesyncError, tf.errors.OpError) as found:
            error = str(found)
        seconds = time.monotonic() - began
        try:
            after = float(strategy.run(lambda: tfrep.all_sum(1.0)))
        except (tfrep.errors.DesyncError, tf.errors.OpError):
            after = 0.0
        seen.append((error, seconds, after))
    return seen


WORDS = {"tf": "differ", "horovod": "Mismatched", "shared_memory": "Ranks called different collectives.\n  rank 0: "}
"""What the error of a function says."""
ALL_HOWS = ["columns", "turned", "dimensions", "dtype"]


@pytest.mark.parametrize("communicator", list(WORDS))
def test_eager(worker_pool: Any, communicator: str) -> None:
    pool = worker_pool(communicator, 2)
    for name in COLLECTIVES:
        for rank in pool.run(differ, name, "eager", ALL_HOWS, limit=60):
            for error, seconds, after in rank:
                assert "Ranks called different collectives.\n  rank 0: " in error
                assert seconds < 20
                assert after == 2.0


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("communicator", list(WORDS))
def test_functions_that_find_it_out_beforehand(worker_pool: Any, communicator: str, mode: str) -> None:
    pool = worker_pool(communicator, 2)
    for name in RECOVERS if communicator == "tf" else COLLECTIVES:
        for rank in pool.run(differ, name, mode, ALL_HOWS, limit=60):
            for how, (error, seconds, after) in zip(ALL_HOWS, rank, strict=True):
                assert WORDS[communicator] in error, (name, how, error)
                assert seconds < 20
                assert after == 2.0


@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [
        ("all_reduce", "static", "columns"),
        ("all_reduce", "dynamic", "turned"),
        ("broadcast", "dynamic", "dtype"),
        ("stock all_reduce", "static", "dimensions"),
    ],
)
def test_functions_that_would_wait_for_each_other(worker_pool: Any, name: str, mode: str, how: str) -> None:
    pool = worker_pool("tf", 2)
    try:
        for error, seconds, after in (seen for rank in pool.run(differ, name, mode, [how], limit=60) for seen in rank):
            assert "Ranks called different collectives.\n  rank 0: all_reduce(" in error
            assert "rank 1: all_reduce(" in error
            assert "test_differing_processes.py:" in error
            assert seconds < 20
            assert after == 0.0  # TensorFlow's runtime cannot go on.
    finally:
        pool.close()
