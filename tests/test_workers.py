"""The pool that the multi-process tests stand on."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import tensorflow as tf
from workers import WorkerFailure, WorkerPool

pytestmark = pytest.mark.lane("package")


def _sum_of_ranks(strategy, factor):
    total = strategy.communicator.all_reduce([tf.constant(factor * strategy.rank)], "sum")[0]
    return int(total), os.getpid()


def _fail_on_one(strategy):
    if strategy.rank == 1:
        raise ValueError("rank 1 is unwell")
    strategy.communicator.all_reduce([tf.zeros([1])], "sum")


def _sleep(strategy):
    time.sleep(60)


@pytest.mark.parametrize(
    ("communicator", "work", "limit", "said"),
    [("tf", _fail_on_one, 120.0, "rank 1 is unwell"), ("horovod", _sleep, 1.0, "Rank 0 did not finish")],
)
def test_pool_keeps_its_processes_and_recovers(worker_pool, communicator, work, limit, said):
    pool = worker_pool(communicator, 2)
    first = pool.run(_sum_of_ranks, 3)
    assert [total for total, _ in first] == [3, 3]
    assert pool.run(_sum_of_ranks, 3) == first
    with pytest.raises(WorkerFailure, match=said):
        pool.run(work, limit=limit)
    assert not any(psutil.pid_exists(pid) for _, pid in first)
    assert [total for total, _ in pool.run(_sum_of_ranks, 5)] == [5, 5]


def test_a_worker_that_cannot_start_is_reported_at_once(monkeypatch):
    monkeypatch.setattr("workers._BOOTSTRAP", "raise SystemExit('this machine has no TensorFlow')")
    with WorkerPool("tf", 2) as pool, pytest.raises(WorkerFailure, match="Rank 1: The process ended.*\n.*has no TensorFlow"):
        pool.run(_sum_of_ranks, 3, limit=10.0)
