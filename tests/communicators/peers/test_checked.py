"""Ranks that call different collectives: an error on every rank that lists them, in place of waiting for ever."""

from __future__ import annotations

import re
import time
from typing import Any

import keras
import pytest
import tensorflow as tf
from needs import needs_horovod
from workers import WorkerPool

import tfrep_strategy as tfrep
from tfrep_strategy.core.calls import user_line
from tfrep_strategy.errors import DesyncError

BOTH = pytest.mark.parametrize(
    "communicator", ["tf", pytest.param("horovod", marks=[needs_horovod, pytest.mark.lane("transports")])]
)


def _differ_eagerly(strategy: Any, how: str) -> tuple[str, str, float]:
    began = time.monotonic()
    communicator = strategy.communicator
    try:
        if how == "shape":
            communicator.all_reduce([tf.zeros([3 + strategy.rank])])
        elif how == "dtype":
            communicator.broadcast([tf.zeros([3], tf.int32 if strategy.rank else tf.float32)])
        elif strategy.rank:
            communicator.barrier()
        else:
            communicator.all_gather(tf.zeros([3]))
    except DesyncError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", 0.0


@BOTH
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["rank 0: all_reduce(float32[3], sum) at ", "rank 1: all_reduce(float32[4], sum) at "]),
        ("dtype", ["rank 0: broadcast(float32[3], root=0)", "rank 1: broadcast(int32[3], root=0)"]),
        ("kind", ["rank 0: all_gather(float32[3])", "rank 1: barrier()"]),
    ],
)
def test_eager_collectives_that_differ(worker_pool: Any, communicator: str, how: str, words: list[str]) -> None:
    results = worker_pool(communicator, 2).run(_differ_eagerly, how)
    assert results[0][:2] == results[1][:2]
    for kind, text, seconds in results:
        assert kind == "DesyncError"
        assert all(word in text for word in words)
        assert text.count("test_checked.py:") == 2
        assert seconds < 30


def _ask_different_things(strategy: Any) -> str:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    try:
        if strategy.rank == 0:
            strategy.assert_in_sync(model)
        else:
            strategy.extended.first_with(["a"])
    except DesyncError as error:
        return str(error)
    return "no error"


@BOTH
def test_objects_that_are_gathered_for_different_ends(worker_pool: Any, communicator: str) -> None:
    results = worker_pool(communicator, 2).run(_ask_different_things)
    for text in results:
        assert "rank 0: all_gather_object(assert_in_sync) at " in text
        assert "rank 1: all_gather_object(first_with) at " in text


def _count_and_order(strategy: Any) -> dict[str, Any]:
    """Calls in branches, loops and called functions, as often as they run."""
    communicator = strategy.communicator
    numbers = communicator.monitor._numbers
    before = numbers[range(2)]

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return communicator.all_reduce([x])[0]

    @tf.function
    def step(x: tf.Tensor, repeat: tf.Tensor) -> tf.Tensor:
        x = inner(x)
        x = tf.cond(x[0] > 0, lambda: communicator.all_reduce([x], "mean")[0], lambda: x)
        for _ in tf.range(repeat):
            x = inner(x)
        return communicator.all_gather(x[: strategy.rank + 1])

    values = step(tf.constant([1.0, 2.0]), tf.constant(3)).numpy().tolist()
    return {"values": values, "calls": numbers[range(2)] - before, "checks": communicator.monitor.checks_every_call}


def _differ_in_function(strategy: Any) -> tuple[str, str]:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        return tfrep.all_reduce(x)

    strategy.run(step, (tf.zeros([3]),))
    try:
        strategy.run(step, (tf.zeros([3 + strategy.rank]),))
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


@BOTH
def test_debug_checks_what_runs_in_functions(communicator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_DEBUG", "1")
    with WorkerPool(communicator, 2) as pool:
        for result in pool.run(_count_and_order):
            # 2 ranks: the sums double, the mean does not; 1 + 1 + 3 + 1 collectives.
            assert result == {"values": [16.0, 16.0, 32.0], "calls": 6, "checks": True}
        results = pool.run(_differ_in_function)
    assert results[0] == results[1]
    kind, text = results[0]
    assert kind == "DesyncError"
    assert "rank 0: all_reduce(float32[3], sum) at " in text
    assert "rank 1: all_reduce(float32[4], sum) at " in text
    assert text.count("test_checked.py:") == 2


def _only_some(strategy: Any) -> tuple[str, str]:
    communicator = strategy.communicator
    communicator.barrier()
    if strategy.rank == 0:  # After the barrier, since a rank may be long in coming to it.
        communicator.monitor._hub._silence = 2.0
    try:
        if strategy.rank == 0:
            communicator.all_reduce([tf.zeros([3])])
        else:
            time.sleep(5.0)
            communicator.barrier()
    except DesyncError as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.lane("wires")
@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod)])
def test_debug_names_who_has_not_called(communicator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_DEBUG", "1")
    with WorkerPool(communicator, 2) as pool:
        results = pool.run(_only_some)
    for kind, text in results:
        assert kind == "DesyncError"
        assert "rank 0: in all_reduce(float32[3], sum), number 4 of ranks 0-1, at " in text
        silent = re.search(r"rank 1: in no collective for (\d+) s, after barrier\(\), number 3 of ranks 0-1, at ", text)
        assert silent is not None, text
        assert int(silent[1]) >= 2
        assert "The first rank that lags is rank 1." in text


def _wait_for_each_other(strategy: Any) -> tuple[str, str]:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        return tfrep.all_reduce(x)

    @tf.function
    def end(x: tf.Tensor) -> Any:
        return tfrep.all_reduce(x, "max")

    for function in (step, end):
        strategy.run(function, (tf.zeros([3]),))
    try:
        strategy.run(end if strategy.rank else step, (tf.zeros([3]),))
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_functions_that_wait_for_each_other_reach_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "6")
    with WorkerPool("tf", 2) as pool:
        results = pool.run(_wait_for_each_other)
    for kind, text in results:
        assert kind == "DesyncError"
        assert "a collective in which others have waited for 6 seconds" in text
        assert text.count("test_checked.py:") == 4  # The line of each collective, and that of each main thread.


def test_the_line_is_the_users() -> None:
    assert user_line().partition(":")[0].endswith("test_checked.py")
    stack = [(tf.__file__, 3), ("<string>", 1), ("/home/me/model.py", 12), ("/home/me/train.py", 40)]
    assert user_line(stack) == "/home/me/model.py:12"
