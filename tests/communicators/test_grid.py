"""Short sums over a grid of ranks: what a ring gives, and the same bits on all members."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.grid import Grid

SCRIPT = Path(__file__).parent / "scripts" / "adds_over_a_grid.py"
REDUCE = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}


@pytest.mark.lane("wires")
@pytest.mark.parametrize("size", [12, 11, 7])
def test_members(size: int) -> None:
    """With more than ten, columns would add up in different orders if TensorFlow sorted their devices as texts.

    The last row of four has three members if there are eleven, or seven.
    """
    done = subprocess.run([sys.executable, SCRIPT, str(size)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    given = np.stack([tf.random.stateless_normal([500], [rank, 0]) + 2.0 for rank in range(size)]).astype(np.float64)
    for op, (kinds, found) in json.loads(done.stdout.splitlines()[-1]).items():
        assert kinds == ["CollectiveGatherV2"]
        assert all(each == found[0] for each in found), op
        np.testing.assert_allclose(found[0][0], REDUCE[op](given, axis=0), rtol=1e-5)
        assert found[0][1] == (int(REDUCE[op](range(1, size + 1))))


@pytest.mark.parametrize(("size", "most"), [(2, 262144), (3, 49151), (4, 131072), (7, 34905), (8, 72817), (64, 152520)])
def test_what_is_short(size: int, most: int) -> None:
    """Messages that follow each other: 2 (n - 1) in a ring, rows + columns - 2 in a full grid; each saved is worth 16 KiB."""
    assert Grid(size - 1, size, lambda name: 1).most_bytes == most


def of_each_length(strategy: Any) -> list[list[float]]:
    communicator = strategy.communicator

    @tf.function
    def reduced() -> list[tf.Tensor]:
        own = [tf.fill([length], float(strategy.rank + 1)) for length in (1, 3000, 10_000)]
        own.append(tf.constant([float("nan")] if strategy.rank == 1 else [1.0]))
        return communicator.all_reduce(own[:1]) + communicator.all_reduce(own[1:3]) + communicator.all_reduce(own[3:], "max")

    return [total.numpy()[[0, -1]].tolist() for total in reduced()]


def test_processes(worker_pool: Any) -> None:
    for found in worker_pool("tf", 3).run(of_each_length):
        assert found[:3] == [[6.0, 6.0]] * 3
        assert np.isnan(found[3]).all()
