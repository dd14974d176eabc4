"""How all ranks come to shared memory, or none does."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tfrep_strategy.cluster.hardware import MOST_SHARING, SHARES_MEMORY, problem_of_sharing
from tfrep_strategy.communicators import shared_memory
from tfrep_strategy.communicators.shared_memory import SharedMemoryCommunicator
from tfrep_strategy.communicators.shared_memory.links import socket_name

pytestmark = pytest.mark.skipif(not SHARES_MEMORY, reason="shared memory needs Linux")


def chosen(strategy: Any, spoil: Callable[[Any], Callable[[], None]], has_gpu: list[bool]) -> tuple[str, float, list[str]]:
    """Which communicator a rank gets if rank 1 has done something, a sum over it, and what it warns of."""
    connected, environment = strategy.communicator, strategy.extended.environment
    with contextlib.ExitStack() as stack:
        if strategy.rank == 1:
            stack.callback(spoil(environment))
        stack.enter_context(mock.patch.object(shared_memory, "_MEETING_SECONDS", 2.0))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        found = shared_memory.over_shared_memory(connected, environment, has_gpu=has_gpu[strategy.rank])
    with contextlib.nullcontext() if found is connected else contextlib.closing(found):
        total = float(tf.function(lambda: found.all_reduce([tf.constant(1.0 + strategy.rank)]))()[0])
        told = found.all_gather_object(found.name)
        assert told == [found.name] * 2
    return found.name, total, [str(each.message) for each in caught]


def nothing(environment: Any) -> Callable[[], None]:
    return lambda: None


def limit(environment: Any, more_files: int = 2) -> Callable[[], None]:
    """Lets this process open only a few more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + more_files, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_the_name(environment: Any) -> Callable[[], None]:
    """Listens where rank 0 would, so that the ranks cannot meet."""
    number = SharedMemoryCommunicator._made[environment.run_name] + 1
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0" + socket_name(f"{environment.run_name}/{number}")[1:])
    server.listen()
    return server.close


CPUS = [False, False]


@pytest.mark.parametrize(
    ("spoil", "has_gpu", "expected", "warned"),
    [
        (nothing, CPUS, "shared_memory", None),
        (nothing, [False, True], "tf", None),
        (limit, CPUS, "tf", "on rank 1, the system refuses it (Too many open files)."),
        (take_the_name, CPUS, "tf", "on rank 0, Rank 0 cannot listen at the rendezvous"),
    ],
)
def test_all_ranks_or_none(
    worker_pool: Any, spoil: Callable[[Any], Callable[[], None]], has_gpu: list[bool], expected: str, warned: str | None
) -> None:
    found = worker_pool("tf", 2).run(chosen, spoil, has_gpu)
    assert [each[:2] for each in found] == [(expected, 3.0)] * 2
    assert not found[1][2]
    assert len(found[0][2]) == (warned is not None)
    for line in found[0][2]:
        assert f'Communicator "tf": shared memory would be faster, but cannot be used: {warned}' in line


def test_limits_are_problems() -> None:
    assert problem_of_sharing(2) is None
    assert problem_of_sharing(MOST_SHARING) is None
    undo = limit(None, 5)
    try:
        assert problem_of_sharing(MOST_SHARING) == "the system refuses it (Too many open files)"
    finally:
        undo()


@pytest.mark.parametrize(("hardest", "problem"), [(-1, None), (1 << 20, "the system refuses it (File too large)")])
def test_the_limit_of_files_counts_where_it_cannot_be_raised(hardest: int, problem: str | None) -> None:
    script = f"""
import resource
from tfrep_strategy.cluster.hardware import problem_of_sharing
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, {hardest}))
print(problem_of_sharing(2), resource.getrlimit(resource.RLIMIT_FSIZE) == (1 << 20, {hardest}))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == f"{problem} True\n"
