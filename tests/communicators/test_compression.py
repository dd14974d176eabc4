"""Gradients that travel as 16-bit floats: the sum is that of float32, rounded to 16 bits, from half the bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import ml_dtypes
import numpy as np
import psutil
import pytest
import tensorflow as tf
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.communicators.shared_memory import memory
from tfrep_strategy.communicators.wire import compressed_gather, compressed_sum
from tfrep_strategy.contrib.digits import load_digits

_HALVES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_FLOATS = 2_000_000


def drawn(rank: int) -> list[np.ndarray]:
    draw = np.random.RandomState(rank)
    return [draw.randn(3, 5).astype("float32"), draw.randn(1).astype("float32"), np.float64(draw.randn()), np.int32(rank + 1)]


def sums(strategy: Any, kind: str) -> list[list[np.ndarray]]:
    tensors = [tf.constant(value) for value in drawn(strategy.rank)]
    in_function = tf.function(lambda *values: compressed_sum(strategy.communicator, values, kind))
    both = compressed_sum(strategy.communicator, tensors, kind), in_function(*tensors)
    return [[total.numpy() for total in totals] for totals in both]


def as_sent(value: np.ndarray, kind: str) -> np.ndarray:
    return value.astype(_HALVES[kind]).astype("float32") if value.dtype == np.float32 else value


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
def test_sums_are_of_float32(communicator: str, kind: str, worker_pool: Any) -> None:
    own = [[as_sent(value, kind) for value in drawn(rank)] for rank in range(2)]
    expected = [as_sent(first + second, kind) for first, second in zip(*own, strict=True)]
    for ways in worker_pool(communicator, 2).run(sums, kind):
        for found in ways:
            for total, wanted in zip(found, expected, strict=True):
                assert total.dtype == wanted.dtype
                np.testing.assert_array_equal(total, wanted)


def rows_of_all(strategy: Any, kind: str) -> list[np.ndarray]:
    rows = tf.constant(drawn(strategy.rank)[0][: strategy.rank + 1])
    counts = tf.constant([[3], [2**40]][: strategy.rank + 1], tf.int64)
    return [compressed_gather(strategy.communicator, each, kind).numpy() for each in (rows, counts)]


@pytest.mark.lane("wires")
def test_gathered_rows(worker_pool: Any) -> None:
    rows = np.concatenate([as_sent(drawn(rank)[0][: rank + 1], "bf16") for rank in range(2)])
    for found, counts in worker_pool("tf", 2).run(rows_of_all, "bf16"):
        np.testing.assert_array_equal(found, rows)
        np.testing.assert_array_equal(counts, [[3], [3], [2**40]])


@contextlib.contextmanager
def over_loopback() -> Iterator[Callable[[], int]]:
    """Counts the bytes that go over the loopback interface, which both ranks use."""
    yield lambda: psutil.net_io_counters(pernic=True)["lo"].bytes_sent


@contextlib.contextmanager
def through_memory() -> Iterator[Callable[[], int]]:
    """Counts the bytes that this rank writes to shared memory: what it brings, and its parts of results."""
    written = []
    read, reduce_in_order = memory.Row.read, memory.reduce_in_order

    def counted_read(row: Any, start: int, into: np.ndarray) -> None:
        written.append(min(row.size - start, len(into)) * into.itemsize)
        read(row, start, into)

    def counted_reduction(parts: Any, op: str, out: np.ndarray) -> None:
        written.append(out.nbytes)
        reduce_in_order(parts, op, out)

    with mock.patch.object(memory.Row, "read", counted_read), mock.patch.object(memory, "reduce_in_order", counted_reduction):
        yield lambda: sum(written)


def bytes_of_sums(strategy: Any, times: int, counting: Callable[[], Any]) -> list[int]:
    """Returns the bytes that travelled: plain, and compressed."""
    communicator, value = strategy.communicator, tf.ones([_FLOATS])
    plain = tf.function(lambda: communicator.all_reduce([value]))
    compressed = tf.function(lambda: compressed_sum(communicator, [value], "bf16"))
    found = []
    for sum_up in (plain, compressed):
        assert float(sum_up()[0][-1]) == 2.0
        communicator.barrier()
        with counting() as count:
            before = count()
            for _ in range(times):
                sum_up()
            communicator.barrier()
            found.append(count() - before)
    return found


@pytest.mark.lane("wires")
@pytest.mark.parametrize(
    ("communicator", "counting", "least"),
    [("tf", over_loopback, 2.0), ("horovod", over_loopback, 2.0), ("shared_memory", through_memory, 1.5)],
)
def test_half_the_bytes(communicator: str, counting: Any, least: float, worker_pool: Any) -> None:
    """A sum of two sends all that both bring. To shared memory, a rank writes what it brings, and half of the result."""
    times = 5
    plain, compressed = worker_pool(communicator, 2).run(bytes_of_sums, times, counting)[0]
    assert plain >= times * least * _FLOATS * 4
    assert compressed < 0.6 * plain


def trained(compression: str | None) -> list[np.ndarray]:
    strategy = tf.distribute.get_strategy()
    if compression is not None:
        strategy.compression = compression
    try:
        keras.utils.set_random_seed(1)
        words = keras.layers.Embedding(50, 8, embeddings_initializer="glorot_uniform")
        model = keras.Sequential([keras.Input((6,), dtype="int32"), words, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        draw = np.random.RandomState(2)
        model.fit(draw.randint(0, 50, (37, 6)), draw.randn(37).astype("float32"), batch_size=8, epochs=2, verbose=0)
        if compression is not None:
            strategy.assert_in_sync(model)
        return model.get_weights()
    finally:
        if compression is not None:
            strategy.compression = None


def trained_in_scope(strategy: Any, compression: str, options: dict[str, Any]) -> list[np.ndarray]:
    if options:
        strategy = tfrep.MultiWorkerStrategy(strategy.communicator.name, **options)
    with strategy.scope():
        return trained(compression)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer_state": True}])
@pytest.mark.parametrize("communicator", ["tf", "horovod", *in_lane("wires", "shared_memory")])
def test_training_is_near_that_of_one_device(communicator: str, options: dict[str, Any], worker_pool: Any) -> None:
    expected = trained(None)
    for found in worker_pool(communicator, 2).run(trained_in_scope, "bf16", options):
        assert any(np.any(a != b) for a, b in zip(found, expected, strict=True))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.lane("wires")
@pytest.mark.parametrize("options", [{}, {"shard_optimizer_state": True}])
def test_training_on_devices_of_one_process(options: dict[str, Any]) -> None:
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    plain, compressed = (tfrep.MirroredStrategy(devices, compression=kind, **options) for kind in (None, "bf16"))
    with plain.scope():
        wanted = trained(None)
    with compressed.scope():
        found = trained("bf16")
    assert any(np.any(a != b) for a, b in zip(found, wanted, strict=True))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_sums_of_devices_of_one_process() -> None:
    """Words cross from device to device, 16 bits for each number; the sums are of float32."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    own = [[as_sent(value, "bf16") for value in drawn(rank)] for rank in range(2)]

    def sums_of_replica() -> list[tf.Tensor]:
        communicator = strategy.extended.own_communicator()
        return compressed_sum(communicator, [tf.constant(value) for value in drawn(communicator.rank)], "bf16")

    @tf.function
    def sums_of_all() -> Any:
        return strategy.run(sums_of_replica)

    for found, first, second in zip(sums_of_all(), *own, strict=True):
        for total in strategy.experimental_local_results(found):
            np.testing.assert_array_equal(total, as_sent(first + second, "bf16"))


def of_digits() -> float:
    """Returns how many of the test's digits a small net knows that has trained for ten epochs."""
    train, test = load_digits()
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Flatten(), keras.layers.Dense(64, "relu")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=10, verbose=0)
    accuracy: float = model.evaluate(*test, verbose=0)[1]
    return accuracy


def of_digits_in_scope(strategy: Any) -> list[float]:
    found = []
    for strategy.compression in (None, "bf16", "fp16"):
        with strategy.scope():
            found.append(of_digits())
    strategy.compression = None
    return found


@pytest.mark.lane("wires")
def test_as_many_digits_are_known(worker_pool: Any) -> None:
    plain, *compressed = worker_pool("tf", 2).run(of_digits_in_scope)[0]
    print(f"\nOf the digits: float32 {plain:.4f}, bf16 {compressed[0]:.4f}, fp16 {compressed[1]:.4f}")
    assert plain == pytest.approx(of_digits(), abs=0.01)
    assert compressed == pytest.approx([plain] * 2, abs=0.01)


def test_one_replica_rounds_nothing() -> None:
    with tfrep.MultiWorkerStrategy(compression="bf16").scope():
        found = trained("bf16")
    for a, b in zip(found, trained(None), strict=True):
        np.testing.assert_array_equal(a, b)
