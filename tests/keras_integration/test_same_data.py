"""Ranks that were given different data are refused, unless they mean it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from lanes import in_lane

from tfrep_strategy.errors import ConfigurationError, DesyncError

BOTH = pytest.mark.parametrize("communicator", ["tf", *in_lane("transports", "horovod")])


def model_for(x: Any, units: int = 1) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((np.shape(x)[1],)), keras.layers.Dense(units)])
    model.compile(keras.optimizers.SGD(0.05), "mse", weighted_metrics=[])
    return model


def rows(count: int = 24, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(first, first + count, dtype=np.float32)[:, np.newaxis] / count
    return x, 3 * x + 1


class Batches(keras.utils.PyDataset):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        x, y = rows(8, index)
        return x, y + self.rank


def with_arrays(strategy: Any, model: Any, rank: int) -> dict[str, Callable[[], Any]]:
    """Gives, by name, calls whose data differs between ranks where `rank` does."""
    x, y = rows()
    other = y + rank
    words = np.random.RandomState(rank).permutation(40)  # The order that a set has in this process.
    tokens = words[:, np.newaxis].astype(np.float32)
    drawn = np.random.default_rng(rank).random((24, 1))  # As without a seed, but surely different.
    return {
        "a vocabulary from a set": lambda: model.fit(tokens, tokens, verbose=0),
        "default_rng() without a seed": lambda: model.predict(drawn, verbose=0),
        "class_weight": lambda: model.fit(x, np.round(y), class_weight={0: 1.0, 1: 1.0 + rank}, verbose=0),
        "sample_weight": lambda: model.evaluate(x, y, sample_weight=np.ones(24) + rank, verbose=0),
        "validation_data": lambda: model.fit(x, y, validation_data=(x, other), verbose=0),
        "batch_size": lambda: model.fit(x, y, batch_size=8 + 4 * rank, verbose=0),
        "rows": lambda: model.predict(x[: 24 - rank], verbose=0),
        "dtype": lambda: model.predict(x.astype("float64" if rank else "float32"), verbose=0),
        "a data frame": lambda: model.fit(pd.DataFrame({"a": x[:, 0]}), pd.Series(other[:, 0]), verbose=0),
        "a tensor": lambda: model.fit(tf.constant(x), tf.constant(other), verbose=0),
    }


def with_pipelines(strategy: Any, model: Any, rank: int) -> dict[str, Callable[[], Any]]:
    x, y = rows()
    other = y + rank
    numbers = tf.data.Dataset.from_tensor_slices((x, other)).batch(8)

    def draw(v: Any) -> Any:
        return v + np.float32(np.random.default_rng(rank).random())

    return {
        "a pipeline": lambda: model.fit(numbers, verbose=0),
        "a pipeline that is evaluated": lambda: model.evaluate(numbers, verbose=0),
        "a pipeline that is predicted": lambda: model.predict(numbers.map(lambda _, y: y), verbose=0),
        "augmentation": lambda: model.fit(
            numbers.map(lambda x, _: (tf.ensure_shape(tf.numpy_function(draw, [x], tf.float32), [None, 1]), x)), verbose=0
        ),
        "a generator": lambda: model.fit(((x, other) for _ in range(2)), verbose=0),
        "a PyDataset": lambda: model.fit(Batches(rank), verbose=0),
    }


def with_steps(strategy: Any, model: Any, rank: int) -> dict[str, Callable[[], Any]]:
    x, y = rows()
    other = y + rank
    numbers = tf.data.Dataset.from_tensor_slices((x, other)).batch(8)

    def loop() -> None:
        for batch in strategy.experimental_distribute_dataset(numbers):
            strategy.run(lambda batch: batch, (batch,))

    return {
        "several steps per call": lambda: several_steps(strategy, numbers),
        "train_on_batch": lambda: model.train_on_batch(x, other),
        "test_on_batch": lambda: model.test_on_batch(x, other),
        "predict_on_batch": lambda: model.predict_on_batch(x + rank),
        "a loop of one's own": loop,
    }


def several_steps(strategy: Any, data: Any) -> None:
    with strategy.scope():
        model = model_for(rows()[0])
        model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(data, verbose=0)


def said_to_different_data(strategy: Any, attempts: Callable[..., Any]) -> tuple[dict[str, str], dict[str, str]]:
    said: tuple[dict[str, str], dict[str, str]] = {}, {}
    for texts, rank in zip(said, (strategy.rank, 0), strict=True):
        with strategy.scope():
            model = model_for(rows()[0])
        for name, attempt in attempts(strategy, model, rank).items():
            try:
                attempt()
                texts[name] = ""
            except DesyncError as error:
                texts[name] = str(error)
    return said


def refused(pool: Any, attempts: Callable[..., Any]) -> dict[str, str]:
    """Returns what the ranks said to different data. All say the same, and nothing to equal data."""
    results = pool.run(said_to_different_data, attempts)
    assert results[0] == results[1]
    different, equal = results[0]
    assert {name: text for name, text in different.items() if not text.startswith("Ranks [1] were given other data")} == {}
    assert {name: text for name, text in equal.items() if text} == {}
    return different


@BOTH
def test_different_arrays_are_refused_on_all_ranks(communicator: str, worker_pool: Any) -> None:
    said = refused(worker_pool(communicator, 2), with_arrays)
    assert "y[0, 0] = 1.0" in said["a tensor"]
    assert "y[0, 0] = 2.0" in said["a tensor"]
    assert "rank_0='x: float32 of shape (24, 1)', rank_1='x: float32 of shape (23, 1)'" in said["rows"]
    assert "class_weight[1] differs" in said["class_weight"]
    for way_out in ('rank_data="own"', "AutoShardPolicy.OFF", "distribute_datasets_from_function"):
        assert way_out in said["validation_data"]


@BOTH
def test_different_pipelines_are_refused_on_all_ranks(communicator: str, worker_pool: Any) -> None:
    assert "the first batch[1]" in refused(worker_pool(communicator, 2), with_pipelines)["a pipeline"]


@BOTH
def test_different_steps_are_refused_on_all_ranks(communicator: str, worker_pool: Any) -> None:
    assert len(refused(worker_pool(communicator, 2), with_steps)) == 5


def strings_and_their_like(strategy: Any) -> list[str]:
    """Data that is no rectangle of numbers."""
    rank, said = strategy.rank, []
    text = lambda r: ["a", "bb" if r else "b", "c", "d"]  # noqa: E731
    data = {
        "text": lambda r: np.array(text(r), object),
        "tensor": lambda r: tf.constant(text(r)),
        "ragged": lambda r: tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0 + r]]),
        "sparse": lambda r: tf.sparse.from_dense([[1.0], [0.0], [2.0 + r], [0.0]]),
    }
    for make in data.values():
        for r in (rank, 0):
            for as_pipeline in (False, True):
                with strategy.scope():
                    model = Counting()
                given = make(r)
                try:
                    model.predict(tf.data.Dataset.from_tensor_slices(given).batch(4) if as_pipeline else given, verbose=0)
                    said.append("equal")
                except DesyncError:
                    said.append("different")
    return said


class Counting(keras.Model):
    def call(self, x: Any) -> Any:
        return tf.ones([2, 1])


def test_text_ragged_and_sparse_data(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(strings_and_their_like) == [4 * ["different", "different", "equal", "equal"]] * 2


def own_data(strategy: Any, way: str) -> tuple[Any, ...]:
    """Rank 0 has 20 rows and rank 1 has 12, as after `x[rank::size]` of rows that do not come alike."""
    x, y = rows(20) if strategy.rank == 0 else rows(12, 20)
    policies = tf.data.experimental.AutoShardPolicy
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policies.OFF
    data: Any = (x, y)
    if way == "OFF":
        data = (tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options),)
    if way == "function":
        own = tf.data.Dataset.from_tensor_slices((x[:12], y[:12])).batch(4)
        data = (strategy.distribute_datasets_from_function(lambda context: own),)
    batches = {"batch_size": 8} if way in ("own", "unchecked") else {}
    strategy.rank_data = way if way in ("own", "unchecked") else "same"
    try:
        with strategy.scope():
            model = model_for(x)
        seen: list[float] = []
        steps = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        model.fit(*data, **batches, shuffle=False, epochs=2, verbose=0, callbacks=[steps])
        weights = model.get_weights()
        loss = model.evaluate(*data, **batches, verbose=0)
        predictions = model.predict(data[0], **batches, verbose=0) if way == "own" else None
        on_batch = model.train_on_batch(x, y) if way == "own" else None
        return weights, loss, predictions, model.get_weights(), on_batch, len(seen)
    finally:
        strategy.rank_data = "same"


def on_one_device() -> tuple[Any, ...]:
    """What one device trains on the same steps: half a batch of each rank, until both have ended."""
    (x0, y0), (x1, y1) = rows(20), rows(12, 20)
    of_0, of_1 = (np.split(np.arange(n), np.cumsum(sizes)) for n, sizes in ((20, [4, 4, 4, 4, 2]), (12, [4, 4, 2, 2, 0])))
    steps = [tuple(np.concatenate([a[i], b[j]]) for a, b in ((x0, x1), (y0, y1))) for i, j in zip(of_0, of_1, strict=True)]
    model = model_for(x0)
    for _ in range(2):
        for x, y in steps:
            model.train_on_batch(x, y)
    weights = model.get_weights()
    everything = [np.concatenate(pair) for pair in ((x0, x1), (y0, y1))]
    loss = model.evaluate(*everything, verbose=0)
    predictions = [model.predict(x, verbose=0) for x in (x0, x1)]
    on_batch = model.train_on_batch(*everything)
    return weights, loss, predictions, model.get_weights(), on_batch


@BOTH
def test_each_way_out_trains_on_the_data_of_all_ranks(communicator: str, worker_pool: Any) -> None:
    weights, loss, predictions, after, on_batch = on_one_device()
    pool = worker_pool(communicator, 2)
    for way in ("own", "OFF"):
        for rank, found in enumerate(pool.run(own_data, way)):
            assert found[5] == 12, "two epochs of six steps: a batch of 8 makes two steps, and the last has rows on rank 0 alone"
            for mine, expected in zip(found[0], weights, strict=True):
                np.testing.assert_allclose(mine, expected, rtol=1e-5)
            assert found[1] == pytest.approx(loss, rel=1e-5)
            if way == "own":
                np.testing.assert_allclose(found[2], predictions[rank], rtol=1e-5)
                assert found[4] == pytest.approx(on_batch, rel=1e-5)
                for mine, expected in zip(found[3], after, strict=True):
                    np.testing.assert_allclose(mine, expected, rtol=1e-5)
    first, second = pool.run(own_data, "function")
    assert first[5] == second[5] == 6
    assert first[1] == second[1]


def unchecked(strategy: Any) -> tuple[float, str]:
    x, y = rows(8, strategy.rank)
    strategy.rank_data = "unchecked"
    try:
        with strategy.scope():
            model = model_for(x)
        loss = model.evaluate(x, y, verbose=0)
        strategy.rank_data = "shared"
    except ConfigurationError as error:
        return loss, str(error)
    finally:
        strategy.rank_data = "same"
    return loss, ""


def test_unchecked_data_is_cut_as_if_it_were_the_same(worker_pool: Any) -> None:
    (a, b) = (rows(8, rank) for rank in (0, 1))
    model = model_for(a[0])
    expected = model.evaluate(*[np.concatenate([u[:4], v[4:]]) for u, v in zip(a, b, strict=True)], verbose=0)
    for loss, refused in worker_pool("tf", 2).run(unchecked):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert refused.startswith("rank_data cannot have this value. Received: rank_data='shared'")


def drawn_in_pipelines(strategy: Any) -> list[float]:
    """Random operations without seeds, of TensorFlow and NumPy: the ranks begin with one state."""
    x, _ = rows(8)
    data = tf.data.Dataset.from_tensor_slices(x).shuffle(8).batch(8)
    drawn = data.map(lambda v: v + tf.random.uniform([8, 1]))
    with strategy.scope():
        model = model_for(x)
    model.predict(drawn, verbose=0)
    return [float(model.predict(np.random.rand(4, 1), verbose=0).sum())]


def test_what_is_drawn_from_shared_states_is_the_same(worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(drawn_in_pipelines)
    assert first == second


def read_once(strategy: Any) -> tuple[int, list[int]]:
    begun, read = [], []

    def elements() -> Any:
        begun.append(1)
        for i in range(4):
            read.append(i)
            yield np.full((2, 1), i, np.float32), np.zeros((2, 1), np.float32)

    signature = (tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))
    with strategy.scope():
        model = model_for(np.ones((2, 1)))
    model.fit(tf.data.Dataset.from_generator(elements, output_signature=signature), verbose=0, epochs=2)
    return len(begun), read


def test_a_pipeline_is_read_once_an_epoch(worker_pool: Any) -> None:
    assert worker_pool("tf", 2).run(read_once) == [(2, [0, 1, 2, 3] * 2)] * 2
