"""What all tests share: four logical CPUs in this process, and pools of processes that start once."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from collections.abc import Callable, Iterator  # noqa: E402

import pytest  # noqa: E402
from workers import WorkerPool  # noqa: E402

import tfrep_strategy as tfrep  # noqa: E402
from tfrep_strategy.launch.identity import horovod_is_installed  # noqa: E402

tfrep.use_logical_cpus(4)
gc.collect()
gc.freeze()  # As in a worker: what is imported stays.

_POOLS_ALIVE = 2  # An idle process keeps some hundred megabytes.


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[Callable[[str, int], WorkerPool]]:
    """Gives `worker_pool(communicator, size)`, whose processes live until other pools were used more recently."""
    pools: dict[tuple[str, int], WorkerPool] = {}

    def get(communicator: str, size: int) -> WorkerPool:
        if communicator == "horovod" and not horovod_is_installed():
            pytest.skip("Horovod is not installed.")
        pool = pools.pop((communicator, size), None) or WorkerPool(communicator, size)
        pools[communicator, size] = pool
        while len(pools) > _POOLS_ALIVE:
            pools.pop(next(iter(pools))).close()
        return pool

    yield get
    for pool in pools.values():
        pool.close()
