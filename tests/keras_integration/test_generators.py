"""Python generators that several pipelines read, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous.epoch_iterator import GeneratorReading, Shelf

FITS, STEPS, VALIDATION_STEPS = 3, 4, 3
SIZES = (4, 1, 3)


def numbers() -> Iterator[int]:
    yield from range(100)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.RandomState(0)
    while True:
        for size in SIZES:
            x = rng.randn(size, 3).astype("float32")
            yield x, x.sum(1, keepdims=True)


def taken(reader: Iterator[Any], count: int) -> list[Any]:
    return [next(reader) for _ in range(count)]


def test_what_was_read_ahead_comes_again() -> None:
    generator = numbers()
    shelf = Shelf.of(generator)
    first = shelf.read(generator, *shelf.begin())
    assert taken(first, 6) == [0, 1, 2, 3, 4, 5]
    shelf.take(2)
    second = Shelf.of(generator).read(generator, *shelf.begin())
    assert taken(second, 7) == [2, 3, 4, 5, 6, 7, 8]
    assert list(first) == []  # It was told to end.
    shelf.take(7)
    for _ in range(2):
        assert list(shelf.read(generator, *shelf.begin())) == list(range(9, 100))
    assert Shelf.of(numbers()) is not shelf


def test_what_steps_have_taken_is_left_out_of_the_next_epoch() -> None:
    generator = numbers()
    reading = GeneratorReading(generator)
    adapter = SimpleNamespace(_first_batches=taken(reading.for_adapter(), 2), generator=None)
    reading.read_by(adapter)
    reading.begin()
    assert taken(adapter.generator(), 5) == [0, 1, 2, 3, 4]
    reading.note_steps(1)
    reading.note_steps(2)
    reading.begin()
    assert taken(adapter.generator(), 4) == [0, 1, 3, 4]  # Keras begins each pipeline with the first two.
    reading.note_steps(1)
    reading.begin()
    assert taken(adapter.generator(), 3) == [0, 1, 3]
    assert not reading.is_interrupted
    other = GeneratorReading(generator)
    assert reading.is_interrupted
    assert taken(other.for_adapter(), 1) == [3]
    reading.begin(goes_on=True)
    assert taken(adapter.generator(), 2) == [3, 4]


def test_a_slow_generator_is_asked_by_one_at_a_time() -> None:
    started, goes_on = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        for number in range(4):
            if number == 1:
                started.set()
                assert goes_on.wait(20.0)
            yield number

    generator = slow()
    shelf, old = Shelf.of(generator), []
    ahead = threading.Thread(target=lambda: old.extend(shelf.read(generator, *shelf.begin())), daemon=True)
    ahead.start()
    assert started.wait(20.0)
    shelf.take(1)  # Does not wait for the generator.
    goes_on.set()
    assert list(shelf.read(generator, *shelf.begin())) == [1, 2, 3]
    ahead.join(20.0)
    assert old == [0, 1, 2, 3][: len(old)]


def test_a_callback_gives_a_generator_what_it_waits_for() -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    rows = np.ones([2, 3], np.float32), np.ones([2, 1], np.float32)

    class Gives(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            for _ in range(STEPS):
                waiting.put(rows)

    def from_queue() -> Iterator[Any]:
        while True:
            yield waiting.get(timeout=20.0)

    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    waiting.put(rows)  # Keras looks at two batches before the first epoch.
    waiting.put(rows)
    history = model.fit(from_queue(), steps_per_epoch=STEPS, epochs=3, verbose=0, callbacks=[Gives()]).history
    assert len(history["loss"]) == 3
    waiting.put(rows)  # What reads ahead ends.


class Stops(keras.callbacks.Callback):
    """Ends an epoch after a batch."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch + 1 == self.after


def counted() -> Iterator[Any]:
    """Yields batches whose rows are all one number."""
    for number in range(1000):
        yield np.full([2, 1], number, np.float32), np.full([2, 1], number, np.float32)


class Total(keras.metrics.Metric):
    """Lists, as digits, which batches an epoch has seen: the sum of 2 ** number."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.total = self.add_weight(shape=(), initializer="zeros", dtype="float64")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(2.0 ** keras.ops.cast(y_true, "float64")) / 2.0)

    def result(self) -> Any:
        return self.total + 0.0


def batches_of(value: float) -> list[int]:
    return [number for number in range(64) if int(value) >> number & 1]


def order_of_batches(strategy: Any) -> list[list[int]]:
    """Trains, validates and is stopped on one generator; returns which batches each epoch and validation has had."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Total()])
    generator = counted()
    given = {"steps_per_epoch": 4, "validation_steps": 3, "verbose": 0}
    history = model.fit(generator, epochs=2, validation_data=generator, **given).history
    found = [batches_of(each) for pair in zip(history["seen"], history["val_seen"], strict=True) for each in pair]
    stopped = model.fit(generator, steps_per_epoch=8, verbose=0, callbacks=[Stops(3)]).history["seen"]
    found += [batches_of(stopped[0])]
    for _ in range(2):
        found += [batches_of(model.fit(generator, steps_per_epoch=1, verbose=0).history["seen"][0])]
    return found


ORDER = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [4, 5, 11], [12, 13, 14], [15], [16]]
"""No batch is lost; a second validation begins with the two batches that Keras has kept from the first one."""


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_generator_for_training_and_validation(num_replicas: int) -> None:
    assert order_of_batches(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])) == ORDER


def test_one_generator_for_training_and_validation_of_processes(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(order_of_batches) == [ORDER, ORDER]


def trained(strategy: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    train, validation, histories = batches(), batches(), []
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        given = {"steps_per_epoch": STEPS, "validation_data": validation, "validation_steps": VALIDATION_STEPS}
        for _ in range(FITS):
            histories.append(model.fit(train, verbose=0, **given).history["val_loss"][0])
    return {"val_loss": histories, "weights": model.get_weights()}


def expected() -> dict[str, Any]:
    train, validation, histories = batches(), batches(), []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for _ in range(FITS):
        for _ in range(STEPS):
            model.train_on_batch(*next(train))
        parts = [np.concatenate(part) for part in zip(*taken(validation, VALIDATION_STEPS), strict=True)]
        histories.append(model.evaluate(*parts, batch_size=len(parts[0]), verbose=0))
    return {"val_loss": histories, "weights": model.get_weights()}


def compare(found: dict[str, Any]) -> None:
    wanted = expected()
    np.testing.assert_allclose(found["val_loss"], wanted["val_loss"], rtol=1e-5, atol=1e-6)
    for value, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_generator_for_several_fits(num_replicas: int) -> None:
    compare(trained(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])))


def test_one_generator_for_several_fits_of_processes(worker_pool: Any) -> None:
    for found in worker_pool("tf", 2).run(trained):
        compare(found)


class _Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.random.default_rng(index).normal(size=(6, 3)).astype("float32")
        return rows, rows.sum(1, keepdims=True)


class _Waits(keras.callbacks.Callback):
    """Gives a pipeline time to read ahead."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.2)


def _losses_and_asked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[int]]:
    """Trains in epochs that end before the data, which workers of Keras make, and counts the batches that they are asked for."""
    asked, original = [0], OrderedEnqueuer.get

    def counted(enqueuer: Any) -> Iterator[Any]:
        for batch in original(enqueuer):
            asked[-1] += 1
            yield batch

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(OrderedEnqueuer, "get", counted)
        for _ in range(2):
            options: dict[str, Any] = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0, "callbacks": [_Waits()]}
            losses += model.fit(_Batches(workers=2), shuffle=False, **options).history["loss"]
            asked.append(0)
    return losses, asked[:-1]


def test_workers_of_keras_are_asked_when_a_step_needs_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two epochs they stop, and fail if a pipeline that reads ahead asks them then."""
    wanted, asked_by_one = _losses_and_asked(monkeypatch)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        losses, asked = _losses_and_asked(monkeypatch)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert asked == asked_by_one == [6, 6]
