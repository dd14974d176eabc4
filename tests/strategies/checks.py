"""Many small checks of a strategy, made in one start of its processes."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

Check = Callable[[Any], None]


class Checks(list[Check]):
    """Functions of a strategy, which it decorates and runs."""

    def __call__(self, function: Check) -> Check:
        self.append(function)
        return function

    def failures(self, strategy: Any) -> str:
        """Runs all, and returns what failed."""
        return "\n".join(filter(None, (failure(strategy, check) for check in self)))

    def failures_in(self, pool: Any) -> str:
        """Runs all in the processes of a pool, and returns what failed. Each check has the time limit of the pool."""
        failed = [(rank, text) for check in self for rank, text in enumerate(pool.run(failure, check)) if text]
        return "\n".join(f"rank {rank}: {text}" for rank, text in failed)


def failure(strategy: Any, check: Check) -> str:
    try:
        check(strategy)
        return ""
    except (Exception, pytest.fail.Exception):
        return f"{check.__name__}\n{traceback.format_exc()}"


def of_each(strategy: Any, value_of: Callable[[int], Any]) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda context: value_of(context.replica_id_in_sync_group))


def first(strategy: Any, value: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0].numpy(), value)


def local(strategy: Any, value: Any) -> list[Any]:
    """The values of the replicas of this process."""
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


def both_ways(call: Callable[[], Any]) -> list[Any]:
    """What a call gives eagerly and in a function."""
    return [call(), tf.function(call, autograph=False)()]


def own_replicas(strategy: Any) -> range:
    start = strategy.extended.first_local_replica
    return range(start, start + strategy.extended.num_local_replicas)


def shared_folder(strategy: Any) -> Path:
    """A folder of rank 0; ranks other than the first leave theirs empty."""
    return Path(strategy.extended.broadcast_object(tempfile.mkdtemp()))
