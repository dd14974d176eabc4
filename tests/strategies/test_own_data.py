"""Ranks that each read their own data, `rank_data="own"`, train as one device on the batches of all of them together."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

BATCH = 4
ROWS = {"the last has fewer rows than ranks": (9, 9), "one rank ends before": (7, 10), "batches of one row": (3, 3)}


def rows(rank: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(rank).randn(count, 3).astype("float32")
    return x, x.sum(1, keepdims=True)


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return made


class Centered(keras.layers.Layer):
    """Takes away the mean of the batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0)


def model_of_a_loop() -> keras.Model:
    """Nobody can repeat its loop with the rows of all ranks, so each runs the step with them."""
    keras.utils.set_random_seed(0)
    loop = keras.layers.Reshape((3, 1)), keras.layers.GRU(2), keras.layers.Dense(1)
    made = keras.Sequential([keras.Input((3,)), Centered(), *loop])
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return made


@contextlib.contextmanager
def reading_own(strategy: Any) -> Iterator[None]:
    strategy.rank_data = "own"
    try:
        with strategy.scope():
            yield
    finally:
        strategy.rank_data = "same"


def fitted(
    strategy: Any, counts: Sequence[int], batch_size: int, as_dataset: bool, make: Callable[[], keras.Model]
) -> tuple[int, list[np.ndarray], list[str]]:
    x, y = rows(strategy.rank, counts[strategy.rank])
    with reading_own(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = make()
        if as_dataset:
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
            trained.fit(data, epochs=2, shuffle=False, verbose=0)
        else:
            trained.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    said = [str(each.message) for each in caught if "ran out of data" in str(each.message)]
    return int(trained.optimizer.iterations), trained.get_weights(), said


def parts(rank: int, count: int, batch_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of a rank in each step: its batches are cut for two replicas, the first of which gets a row more."""
    x, y = rows(rank, count)
    found = []
    for start in range(0, count, batch_size):
        stop = min(start + batch_size, count)
        middle = start + (stop - start + 1) // 2
        found += [(x[a:b], y[a:b]) for a, b in ((start, middle), (middle, stop)) if a < b]
    return found


@pytest.mark.parametrize(
    ("kind", "as_dataset", "make"),
    [*((kind, as_dataset, model) for kind in ROWS for as_dataset in (False, True)), (next(iter(ROWS)), True, model_of_a_loop)],
)
def test_no_step_without_rows(kind: str, as_dataset: bool, make: Callable[[], keras.Model], worker_pool: Any) -> None:
    batch_size = 1 if kind == "batches of one row" else BATCH
    of_ranks = [parts(rank, count, batch_size) for rank, count in enumerate(ROWS[kind])]
    steps = max(map(len, of_ranks))
    alone = make()
    for _ in range(2):
        for step in range(steps):
            there = [own[step] for own in of_ranks if step < len(own)]
            alone.train_on_batch(*(np.concatenate(part) for part in zip(*there, strict=True)))
    for iterations, weights, said in worker_pool("tf", 2).run(fitted, ROWS[kind], batch_size, as_dataset, make):
        if not as_dataset:  # Nobody knows the length of the first epoch, after which Keras counts one more.
            assert iterations == 2 * steps
        assert said == []
        for value, wanted in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


SENTENCES = [np.array([[1, 2, 3], [4, 5, 0]]), np.array([[4, 5, 6, 7, 8, 9], [1, 1, 2, 0, 0, 0]])]


def tagged() -> keras.Model:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.Dense(3, "softmax")])
    made.compile(keras.optimizers.SGD(1.0), "sparse_categorical_crossentropy")
    return made


def losses_of_sentences(strategy: Any) -> list[float]:
    x = SENTENCES[strategy.rank]
    with reading_own(strategy):
        trained = tagged()
        return [float(trained.train_on_batch(x, x % 3)) for _ in range(3)]


def test_masked_sentences_of_other_lengths(worker_pool: Any) -> None:
    longest = max(x.shape[1] for x in SENTENCES)
    x = np.concatenate([np.pad(x, [(0, 0), (0, longest - x.shape[1])]) for x in SENTENCES])
    alone = tagged()
    wanted = [float(alone.train_on_batch(x, x % 3)) for _ in range(3)]
    for found in worker_pool("tf", 2).run(losses_of_sentences):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
