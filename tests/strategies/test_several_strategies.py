"""Several strategies in one process: their collectives do not meet."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import identities
from tfrep_strategy.errors import ConfigurationError


def _loop(strategy: Any) -> Any:
    """A step with collectives at its top, in a branch, and in a loop, as a function of its own."""

    def body(x: tf.Tensor) -> tf.Tensor:
        total = tfrep.all_sum(x)
        total = tf.cond(total > 0.0, lambda: tfrep.all_reduce(total, "max"), lambda: total)
        for _ in tf.range(2):
            total = tfrep.all_reduce(total, "mean")
        return total

    return tf.function(lambda x: strategy.run(body, (x,)))


def interleaved(first: Any, communicator: str) -> dict[str, Any]:
    rank = first.rank
    second = tfrep.MultiWorkerStrategy(communicator)
    passing = tfrep.MultiWorkerStrategy(communicator)
    passed = float(passing.run(lambda: tfrep.all_sum(1.0)))
    del passing
    gc.collect()
    strategies = [first, second, tfrep.MultiWorkerStrategy(communicator)]
    loops = [_loop(strategy) for strategy in strategies]
    # Each its own values, in turns; one is traced anew in between.
    sums = [[float(loop(tf.constant(10.0**i * (rank + step)))) for i, loop in enumerate(loops)] for step in (1, 2)]
    loops[1] = _loop(second)
    sums.append([float(loop(tf.constant(10.0**i * (rank + 3)))) for i, loop in enumerate(loops)])

    x, y = np.linspace(-1, 1, 24).reshape(8, 3).astype("float32"), np.arange(8, dtype="float32")[:, None]
    models, weights = [], []
    for strategy in strategies[:2]:
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            models.append((strategy, model))
    for _ in range(3):
        for strategy, model in models:
            with strategy.scope():
                model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    weights = [model.get_weights() for _, model in models]
    groups = [strategy.new_group([0]).communicator_of(rank) for strategy in strategies[:2]]
    alone = [float(group.all_reduce([tf.constant(7.0)])[0]) for group in groups]
    return {"passed": passed, "sums": sums, "weights": weights, "alone": alone}


@pytest.mark.parametrize("communicator", ["tf", "horovod", *in_lane("wires", "shared_memory")])
def test_steps_of_several_strategies_interleave(worker_pool: Any, communicator: str) -> None:
    for rank in worker_pool(communicator, 2).run(interleaved, communicator):
        assert rank["passed"] == 2.0
        np.testing.assert_allclose(rank["sums"], [[3.0, 30.0, 300.0], [5.0, 50.0, 500.0], [7.0, 70.0, 700.0]])
        for first, second in zip(*rank["weights"], strict=True):
            np.testing.assert_array_equal(first, second)
        assert rank["alone"] == [7.0, 7.0]


def forgotten_by_one_rank(first: Any, communicator: str, folder: str) -> list[Any]:
    """Rank 0 frees a strategy at once, the other rank keeps it. Python's garbage collector does no less."""
    kept = tfrep.MultiWorkerStrategy(communicator)
    if first.rank == 0:
        del kept
    gc.collect()
    path = tf.train.Checkpoint(v=tf.Variable(3.0)).write(os.path.join(folder, "checkpoint"))
    read = tf.Variable(0.0)
    tf.train.Checkpoint(v=read).read(path).assert_consumed()
    return [float(read), tfrep.broadcast_object(first.rank, root=1), float(first.run(lambda: tfrep.all_sum(1.0)))]


@pytest.mark.parametrize("communicator", ["horovod", *in_lane("wires", "tf", "shared_memory")])
def test_a_strategy_that_only_one_rank_has_forgotten(worker_pool: Any, communicator: str, tmp_path: Any) -> None:
    assert worker_pool(communicator, 2).run(forgotten_by_one_rank, communicator, str(tmp_path)) == [[3.0, 1, 2.0]] * 2


def connected_elsewhere(strategy: Any) -> str:
    told = strategy.extended.environment
    turned = SimpleNamespace(
        rank=told.rank,
        size=told.size,
        local_rank=told.rank,
        local_size=told.size,
        addresses=told.addresses[::-1],
        name="turned",
        rendezvous="",
    )
    try:
        type(strategy.communicator.inner)(turned)
    except ConfigurationError as error:
        return str(error)
    return "none"


def test_other_addresses_are_refused(worker_pool: Any) -> None:
    for text in worker_pool("tf", 2).run(connected_elsewhere):
        assert "already connected to other processes" in text


def both_communicators(first: Any, rendezvous: list[dict[str, str]]) -> list[float]:
    """TensorFlow's collectives, and then Horovod's as well."""
    os.environ.update(rendezvous[first.rank])
    second = tfrep.MultiWorkerStrategy("horovod")
    assert (first.communicator.name, second.communicator.name) == ("tf", "horovod")
    loops = [_loop(first), _loop(second)]
    turns = list(zip((1.0, 10.0), loops, strict=True)) * 2
    values = [float(loop(tf.constant(scale * (first.rank + 1)))) for scale, loop in turns]
    third = tfrep.MultiWorkerStrategy("horovod")
    return [*values, float(third.run(lambda: tfrep.all_sum(1.0)))]


def test_tensorflow_beside_horovod(worker_pool: Any) -> None:
    worker_pool("horovod", 2)  # Skips where it is not installed.
    pool = worker_pool("tf", 2)
    try:
        with identities("horovod", 2) as rendezvous:
            for values in pool.run(both_communicators, rendezvous):
                assert values == [3.0, 30.0, 3.0, 30.0, 2.0]
    finally:
        pool.close()
