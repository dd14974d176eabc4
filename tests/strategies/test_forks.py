"""Processes that a script forks: those without TensorFlow work, and those that would wait for ever are told so at once."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import tensorflow as tf
from fork_programs import AT_ONCE, adds, forks
from lanes import in_lane

import tfrep_strategy as tfrep


def _in_process(strategy: Any) -> Any:
    import fork_programs

    return fork_programs.forks(strategy)


def _in_process_with_a_kill(strategy: Any) -> Any:
    import fork_programs

    return fork_programs.loses_a_child(strategy)


def _check(added: list[float], told: list[str], took: float, loss: float) -> None:
    assert added == [3.0, 6.0]
    assert len(told) == 3
    for each in told:
        assert "forked" in each
        assert "Hint: start it with multiprocessing.get_context('spawn')." in each
    assert took < 3 * AT_ONCE
    assert loss > 0


def test_forks_beside_mirrored_replicas() -> None:
    _check(*forks(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])))


@pytest.mark.parametrize("communicator", ["tf", *in_lane("callbacks", "horovod", "shared_memory")])
def test_forks_beside_a_rank(communicator: str, worker_pool: Any) -> None:
    for found in worker_pool(communicator, 2).run(_in_process):
        _check(*found)


@pytest.mark.parametrize("communicator", ["tf", *in_lane("callbacks", "horovod", "shared_memory")])
def test_a_child_that_is_killed_ends_nothing_else(communicator: str, worker_pool: Any) -> None:
    """The pool that has lost it says so, as in plain Python, and training does not notice."""
    for told, losses, others in worker_pool(communicator, 2).run(_in_process_with_a_kill, limit=60.0):
        assert told == "BrokenProcessPool"
        assert losses == others


def test_forks_where_there_is_one_device() -> None:
    """Nothing is refused: whether it works is TensorFlow's affair."""
    with tf.distribute.get_strategy().scope(), multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(adds, [3]) == [3.0]
