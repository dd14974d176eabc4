"""What all tests share: four logical CPUs in this process, and pools of processes that start once."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys

# A shell that runs tests in the background lets them ignore it, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from collections.abc import Callable, Iterator  # noqa: E402

import coverage_of_rooms  # noqa: E402
import docstrings  # noqa: E402
import lanes  # noqa: E402
import leaks  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402
from workers import WorkerPool  # noqa: E402

import tfrep_strategy as tfrep  # noqa: E402
from tfrep_strategy.cluster.identity import horovod_is_installed  # noqa: E402
from tfrep_strategy.core.tf import OwnedIterator  # noqa: E402
from tfrep_strategy.data.pipeline_ends import end_pipeline  # noqa: E402
from tfrep_strategy.keras_integration import refusals  # noqa: E402

tfrep.use_logical_cpus(4)
gc.collect()
OwnedIterator.__del__ = end_pipeline  # What one device does to compare with ends as fast as ours.
gc.freeze()  # As in a worker: what is imported stays.

_POOLS_ALIVE = 2  # An idle process keeps some hundred megabytes.
_MANY_PROCESSES = ("test_collectives.py", "test_one_device_answer.py")
"""Modules that use pools of more than two processes, too. They come behind all others."""


pytest_addoption = coverage_of_rooms.pytest_addoption


def pytest_configure(config: pytest.Config) -> None:
    coverage_of_rooms.measure_if_wanted(config)
    config.pluginmanager.register(lanes)
    config.pluginmanager.register(leaks)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs modules that use pools of processes last, so that no pool is idle meanwhile, and none starts twice."""
    pooled = {item.path for item in items if "worker_pool" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: 2 if item.path.name in _MANY_PROCESSES else item.path in pooled)


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[str, int], WorkerPool]]:
    pools: dict[tuple[str, int], WorkerPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def worker_pool(_pools: dict[tuple[str, int], WorkerPool]) -> Callable[[str, int], WorkerPool]:
    """Gives `worker_pool(communicator, size)`, whose processes live until other pools were used more recently."""

    def get(communicator: str, size: int) -> WorkerPool:
        if communicator == "horovod" and not horovod_is_installed():
            pytest.skip("Horovod is not installed.")
        pool = _pools.pop((communicator, size), None) or WorkerPool(communicator, size, leaks.kept)
        _pools[communicator, size] = pool
        while len(_pools) > _POOLS_ALIVE:
            _pools.pop(next(iter(_pools))).close()
        return pool

    return get


@pytest.fixture(autouse=True)
def _strategies_of_earlier_tests() -> None:
    """Strategies that earlier tests have left alive do not look for models outside of their scopes."""
    refusals._strategies.clear()


@pytest.fixture(scope="session")
def stock_mirrored() -> tf.distribute.Strategy:
    """A strategy of TensorFlow, of which a process can have one: the keys of another's collectives begin at the same number."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How the examples of a module's tests differ from the docstrings, by name; all run in one process."""
    items = [item for item in request.session.items if item.path == request.path and "differences" in item.fixturenames]
    results = tmp_path_factory.mktemp("examples") / "differences.json"
    command = [sys.executable, docstrings.__file__, str(results), *(item.callspec.params["name"] for item in items)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(results.read_text("utf-8"))
