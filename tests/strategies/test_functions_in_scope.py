"""`tf.function`s of the user's own, called in a scope: replicas share the work of those that train, with one device's numbers."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane, others_in_lane
from strategies.own_functions import PROGRAMS, ran
from workers import WorkerFailure

import tfrep_strategy as tfrep
from tfrep_strategy.strategies import partitioned_functions
from tfrep_strategy.strategies.partitioned_functions import PartitionedFunction


def _check(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for own, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-12, atol=1e-12)


def _shared(strategy: Any, name: str) -> tuple[list[np.ndarray], int]:
    """Returns what a program gives in a scope, and how many of its functions replicas have shared."""
    with strategy.scope():
        before = set(partitioned_functions._candidates)
        got = ran(name, tf.function)
        made = [found for function, found in partitioned_functions._candidates.items() if function not in before]
    return got, sum(bool(found and any(found.describe())) for found in made)


@pytest.fixture
def _candidates_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_functions, "_candidates", {})


_SHORT = ("gan", "replayed", "physics", "accumulated", "acted", "in_two_phases", "in_epochs", "in_steps")


@pytest.mark.parametrize("replicas", [2, *in_lane("functions_mirrored", 3)])
@pytest.mark.parametrize("name", others_in_lane("functions_mirrored", PROGRAMS, *_SHORT))
@pytest.mark.usefixtures("_candidates_stay")
def test_programs_on_mirrored_replicas(name: str, replicas: int) -> None:
    wanted = ran(name, tf.function)
    got, shared = _shared(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]), name)
    _check(got, wanted)
    assert shared >= 1


def _in_process(strategy: Any, names: list[str]) -> list[list[np.ndarray]]:
    partitioned_functions._candidates = {}
    found = [_shared(strategy, name) for name in names]
    assert all(shared for _, shared in found)
    return [got for got, _ in found]


@pytest.mark.parametrize(
    ("communicator", "size", "names"),
    [
        ("tf", 2, _SHORT),
        *in_lane(
            "functions_processes",
            *((*each, tuple(PROGRAMS)) for each in (("tf", 2), ("horovod", 2), ("shared_memory", 2), ("tf", 4))),
        ),
    ],
    ids=lambda value: f"{len(value)} programs" if isinstance(value, tuple) else str(value),
)
def test_programs_in_processes(worker_pool: Any, communicator: str, size: int, names: tuple[str, ...]) -> None:
    of_ranks = worker_pool(communicator, size).run(_in_process, list(names), limit=400.0)
    for name, *got in zip(names, *of_ranks, strict=True):
        wanted = ran(name, tf.function)
        for own in got:
            _check(own, wanted)


def _partitioned(function: Any) -> bool:
    found: PartitionedFunction | None = partitioned_functions.candidate(function)
    return found is not None and bool(found.describe())


def test_what_does_not_train_is_left_alone() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(0.0)

        @tf.function
        def reads(x: tf.Tensor) -> tf.Tensor:
            return total + tf.reduce_sum(x)

        @tf.function
        def counts() -> None:
            total.assign_add(1.0)

        @tf.function
        def runs(x: tf.Tensor) -> Any:
            return strategy.run(lambda: total.assign_add(tf.reduce_sum(x)))

        @tf.function
        def adds(x: tf.Tensor) -> None:
            total.assign_add(tf.reduce_sum(x))

        x = tf.ones([4])
        assert float(reads(x)) == 4.0
        counts()
        runs(x)
        total.assign(1.0)
        adds(x)
        with tf.GradientTape():  # It would not see what replicas do.
            adds(x)
        strategy.partition_functions = False
        adds(x)
        assert float(total) == 13.0
        assert not any(map(_partitioned, (reads, counts, runs)))
        assert _partitioned(adds)
        assert "sum of" in strategy.explain(adds)
        assert "not been called" in strategy.explain(reads)
        assert float(reads.get_concrete_function(x)(x)) == 17.0


def test_arguments_that_are_sometimes_rows() -> None:
    """Nests, NumPy arrays, Python numbers, keywords, sizes that a signature fixes, relaxed shapes, and an error of the function."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(tf.zeros([2]))

        @tf.function(reduce_retracing=True)
        def adds(given: Any, factor: float = 1.0, *, names: tuple[str, ...] = ()) -> Any:
            if "wrong" in names:
                raise ValueError("wrong")
            total.assign_add(factor * tf.reduce_sum(given["x"], 0))
            return {"total": total, "x": given["x"]}

        @tf.function(input_signature=[tf.TensorSpec([4, 2], tf.float32)])
        def fixed(x: tf.Tensor) -> None:
            total.assign_add(tf.reduce_sum(x, 0))

        rows = np.arange(8.0, dtype="float32").reshape(4, 2)
        for given in (rows, rows[:3], rows[:1], rows[:0]):
            np.testing.assert_array_equal(adds({"x": given})["x"], given)
        adds({"x": tf.constant(rows)}, 2.0, names=("a",))
        fixed(rows)
        expected = rows.sum(0) * 4 + rows[:3].sum(0) + rows[:1].sum(0)
        np.testing.assert_allclose(total, expected)
        with pytest.raises(ValueError, match="wrong"):
            adds({"x": rows}, names=("wrong",))
        with pytest.raises((ValueError, TypeError)):
            fixed(rows[:3])
        np.testing.assert_allclose(total, expected)


def test_xla_compiles_what_lies_between_collectives() -> None:
    def train(scope: Any) -> list[np.ndarray]:
        with scope:
            keras.utils.set_random_seed(1)
            model, optimizer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")]), keras.optimizers.Adam(0.1)

            @tf.function(jit_compile=True)
            def step(x: tf.Tensor) -> tf.Tensor:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x) ** 2)
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return loss

            rows = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
            return [step(rows).numpy(), step(rows).numpy(), *model.get_weights()]

    got, wanted = train(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope()), train(tf.distribute.get_strategy().scope())
    for own, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-6)


def _in_a_lone_callback(strategy: Any) -> list[float]:
    class Counts(keras.callbacks.Callback):
        """Rank 0 alone has it. Its function trains a number, and is called in a thread, too."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.adds(tf.ones([4]))
            thread = threading.Thread(target=self.adds, args=(tf.ones([4]),))
            thread.start()
            thread.join(30.0)

        def __init__(self) -> None:
            super().__init__()
            self.total = tf.Variable(0.0)

        @tf.function
        def adds(self, x: tf.Tensor) -> None:
            self.total.assign_add(tf.reduce_sum(x))

    with strategy.scope():
        counts = Counts()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        rows = np.ones((8, 2), "float32")
        model.fit(rows, rows[:, :1], epochs=2, verbose=0, callbacks=[counts] if strategy.rank == 0 else [])
    return [float(strategy.experimental_local_results(counts.total)[0])]


def test_one_rank_may_call_functions_where_it_acts_alone(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(_in_a_lone_callback) == [[16.0], [0.0]]


def _with_data_of_its_own(strategy: Any) -> tuple[float, bool]:
    with strategy.scope():
        total = tf.Variable(0.0)

        @tf.function
        def adds(x: tf.Tensor) -> None:
            total.assign_add(tf.reduce_sum(x))

        with pytest.warns(UserWarning, match="with different arguments"):
            adds(tf.ones([4]) * (strategy.rank + 1.0))
        return float(total), _partitioned(adds)


def test_ranks_with_data_of_their_own_go_on_as_before(worker_pool: Any) -> None:
    for told, shared in worker_pool("tf", 2).run(_with_data_of_its_own):
        assert told in (4.0, 8.0)
        assert shared  # It says why it is not.


def _on_one_rank(strategy: Any) -> None:
    with strategy.scope():
        total = tf.Variable(0.0)

        @tf.function
        def train_step(x: tf.Tensor) -> None:
            total.assign_add(tf.reduce_sum(x))

        train_step(tf.ones([4]))
        if strategy.rank == 0:
            train_step(tf.ones([6]))
        tfrep.barrier()


def test_a_step_on_one_rank_only_is_told_within_seconds(worker_pool: Any) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        worker_pool("tf", 2).run(_on_one_rank)
    assert time.monotonic() - began < 60.0
    assert "DesyncError" in str(caught.value)
    assert "train_step" in str(caught.value) or f"{__file__}" in str(caught.value)


def _called_otherwise(strategy: Any, differs: str) -> None:
    with strategy.scope():
        total = tf.Variable(0.0)

        @tf.function
        def adds(x: tf.Tensor) -> None:
            total.assign_add(tf.reduce_sum(x))

        @tf.function
        def subtracts(x: tf.Tensor) -> None:
            total.assign_sub(tf.reduce_sum(x))

        for function in (adds, subtracts):
            function(tf.ones([6]))
        is_first = strategy.extended.environment.rank == 0
        if differs == "order":
            (adds if is_first else subtracts)(tf.ones([6]))
            (subtracts if is_first else adds)(tf.ones([6]))
        else:
            adds(tf.ones([6 if is_first else 5]))
        tfrep.barrier()


@pytest.mark.parametrize("differs", ["order", "shapes"])
@pytest.mark.parametrize("communicator", ["tf", *in_lane("functions_processes", "horovod", "shared_memory")])
def test_functions_in_another_order_or_with_other_shapes(communicator: str, differs: str, worker_pool: Any) -> None:
    """Both ranks are told at once, with both functions and both lines."""
    began = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        worker_pool(communicator, 2).run(_called_otherwise, differs)
    assert time.monotonic() - began < 60.0
    of_ranks = str(caught.value).split("Rank 1:")
    other = "subtracts(float32[6])" if differs == "order" else "adds(float32[5])"
    for told in of_ranks:
        assert "DesyncError: Ranks called different functions." in told
        assert re.search(r"rank 0: .*adds\(float32\[6\]\) at .*test_functions_in_scope\.py:\d+", told)
        assert re.search(rf"rank 1: .*{re.escape(other)} at .*test_functions_in_scope\.py:\d+", told)


def _looked_at_by_one(strategy: Any) -> float:
    with strategy.scope():
        total = tf.Variable(0.0)

        @tf.function
        def step(x: tf.Tensor, trains: bool) -> tf.Tensor:
            if trains:
                total.assign_add(tf.reduce_sum(x))
            return tf.reduce_max(x)

        step(tf.ones([6]), True)
        if strategy.extended.environment.rank == 0:
            for size in (6, 5):
                step(tf.ones([size]), False)
        step(tf.ones([4]), True)
        return float(total)


def test_one_rank_may_look_at_what_another_call_trains(worker_pool: Any) -> None:
    """What trains nothing is no call that ranks make together, also of a function that they share otherwise."""
    assert worker_pool("tf", 2).run(_looked_at_by_one) == [10.0, 10.0]
