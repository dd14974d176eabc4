"""Every scenario gives on N replicas what it gives on one device."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scenarios

import tfrep_strategy as tfrep

# Half precision rounds differently where the batch is cut; XLA fuses differently.
TOLERANCES = {"weights_rough": 2e-2}


@functools.cache
def on_one_device(name: str) -> dict[str, Any]:
    return scenarios.run(name)


def assert_same(found: Any, expected: Any, path: str, tolerance: float = 1e-5) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}", TOLERANCES.get(key, tolerance))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert_same(f, e, f"{path}[{i}]", tolerance)
    else:
        # Relative to the largest value of a tensor: what cancels to nearly nothing has no digits of its own.
        scale = max(1.0, float(np.nanmax(np.abs(expected)))) if np.size(expected) else 1.0
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=path)


@functools.cache
def mirrored(num_replicas: int) -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


KINDS = ("mirrored", "tf", "horovod")


def drawn_lane(scenario: str, kind: str, kinds: Sequence[str] = KINDS) -> pytest.MarkDecorator:
    """Returns the mark of a test's lane. The short lane has half of the scenarios, each on one kind of replicas.

    Args:
        scenario: The scenario.
        kind: The kind of replicas on which the test runs it.
        kinds: Those from which the one of the short lane is drawn.
    """
    number = zlib.crc32(scenario.encode())
    half = 1 + number // len(KINDS) % 2
    if half == 2 or kind != kinds[number % len(kinds)]:
        return pytest.mark.lane(f"scenarios_{kind}_{half}")
    if kind != "mirrored":
        return pytest.mark.lane("short")
    # Composed models take long. The short lane has some of them on processes.
    return pytest.mark.lane("scenarios_mirrored_1" if scenario.startswith("model_") else "quick")


@pytest.mark.parametrize("name", [pytest.param(name, marks=drawn_lane(name, "mirrored")) for name in sorted(scenarios.SCENARIOS)])
def test_two_mirrored_replicas(name: str) -> None:
    with mirrored(2).scope():
        found = scenarios.run(name)
    assert_same(found, on_one_device(name), name)


# What depends on how a batch is cut, and the three that the promise names.
PROMISED = ["sgd_momentum", "adam", "cnn_synchronized_batch_normalization"]
CUT = ["masked_sequence", "loss_mean_with_sample_weight", "all_reduce_in_call", "on_batch", "fewer_rows_than_replicas"]
CUT += ["clipped_by_global_norm", "clipped_and_accumulated", "learning_to_learn", "scaled_losses_of_ones_own", "updated_by_hand"]
OTHER_NUMBERS = [*((name, number) for name in PROMISED for number in (1, 3, 4)), *((name, 3) for name in CUT)]


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [pytest.param(name, number, marks=drawn_lane(f"{name}-{number}", "mirrored")) for name, number in OTHER_NUMBERS],
)
def test_other_numbers_of_mirrored_replicas(name: str, num_replicas: int) -> None:
    with mirrored(num_replicas).scope():
        found = scenarios.run(name)
    assert_same(found, on_one_device(name), name)


def run_in_scope(strategy: Any, name: str) -> dict[str, Any]:
    with strategy.scope():
        return scenarios.run(name)


@pytest.mark.parametrize(
    ("communicator", "name"),
    [pytest.param(kind, name, marks=drawn_lane(name, kind)) for kind in ("horovod", "tf") for name in sorted(scenarios.SCENARIOS)],
)
def test_two_processes(communicator: str, name: str, worker_pool: Any) -> None:
    pool = worker_pool(communicator, 2)
    for rank, found in enumerate(pool.run(run_in_scope, name, limit=120, meanwhile=lambda: on_one_device(name))):
        assert_same(found, on_one_device(name), f"rank {rank}: {name}")


@pytest.mark.parametrize(
    ("communicator", "name"),
    [pytest.param(kind, name, marks=drawn_lane(name, kind, ["horovod"])) for kind in ("horovod", "tf") for name in PROMISED],
)
def test_four_processes(communicator: str, name: str, worker_pool: Any) -> None:
    pool = worker_pool(communicator, 4)
    for rank, found in enumerate(pool.run(run_in_scope, name, limit=180, meanwhile=lambda: on_one_device(name))):
        assert_same(found, on_one_device(name), f"rank {rank}: {name}")
