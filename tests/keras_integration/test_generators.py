"""Python generators that several pipelines read, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous.generators import GeneratorReading, Shelf

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
    first = shelf.read(generator)
    assert taken(first, 6) == [0, 1, 2, 3, 4, 5]
    shelf.take(2)
    second = Shelf.of(generator).read(generator)
    assert taken(second, 7) == [2, 3, 4, 5, 6, 7, 8]
    assert list(first) == []  # It was told to end.
    shelf.take(7)
    assert list(shelf.read(generator)) == list(range(9, 100))
    assert list(shelf.read(generator)) == list(range(9, 100))
    assert Shelf.of(numbers()) is not shelf


def test_what_steps_have_taken_is_left_out_of_the_next_epoch() -> None:
    generator = numbers()
    reading = GeneratorReading(generator)
    adapter = SimpleNamespace(_first_batches=taken(reading.for_adapter(), 2), generator=None)
    reading.go_on_in(adapter)
    one, other = object(), object()
    assert taken(adapter.generator(), 5) == [0, 1, 2, 3, 4]
    reading.note_steps(one, 1)
    reading.note_steps(one, 2)
    assert taken(adapter.generator(), 4) == [0, 1, 3, 4]  # Keras begins each pipeline with the first two.
    reading.note_steps(other, 1)
    assert taken(adapter.generator(), 3) == [0, 1, 3]


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
    ahead = threading.Thread(target=lambda: old.extend(shelf.read(generator)), daemon=True)
    ahead.start()
    assert started.wait(20.0)
    goes_on.set()
    assert list(shelf.read(generator)) == [0, 1, 2, 3]
    ahead.join(20.0)
    assert old == [0, 1, 2, 3][: len(old)]


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
