"""Processes that read a pipeline compute their own examples only, and train what one device trains."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import DesyncError

_BATCH, _ROWS = 6, 22


def in_batches(folder: str) -> tf.data.Dataset:
    """Batches of numbers, each of which is read from a file."""

    def read(name: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        number = tf.strings.to_number(tf.io.read_file(tf.strings.join([folder, "/", name])))
        return tf.stack([number, 1.0]), 3.0 * number[tf.newaxis]

    names = [f"{i}.txt" for i in range(_ROWS)]
    return tf.data.Dataset.from_tensor_slices(names).map(read, 2).batch(_BATCH)


def trained(folder: str) -> list[float]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    losses = model.fit(in_batches(folder), epochs=2, verbose=0).history["loss"]
    return [*losses, *np.concatenate([w.ravel() for w in model.get_weights()]).tolist()]


def trained_with_own_files(strategy: Any, folder: str) -> tuple[list[float], str]:
    with strategy.scope():
        return trained(f"{folder}/{strategy.rank}"), strategy.explain(in_batches(folder))


def test_the_files_of_others_are_not_needed(worker_pool: Any, tmp_path: Path) -> None:
    for start in range(0, _ROWS, _BATCH):
        for rank, part in enumerate(np.array_split(np.arange(start, min(start + _BATCH, _ROWS)), 2)):
            for i in part:
                for folder in (str(rank), "all"):
                    (tmp_path / folder).mkdir(exist_ok=True)
                    (tmp_path / folder / f"{i}.txt").write_text(str(i % 5))
    expected = trained(str(tmp_path / "all"))
    for result, said in worker_pool("tf", 2).run(trained_with_own_files, str(tmp_path)):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
        assert said == "Each of 2 processes computes for its own examples only: batch, map(read)."


def refused(strategy: Any, differs: bool) -> str:
    numbers = np.arange(8.0)
    if differs and strategy.rank == 1:
        numbers[2] = 9.0
    data = tf.data.Dataset.from_tensor_slices(numbers).map(lambda v: (v[tf.newaxis], v[tf.newaxis])).batch(4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(data, verbose=0)
    except DesyncError as error:
        return str(error)
    return "none"


def test_what_is_read_is_compared_before_it_is_mapped(worker_pool: Any) -> None:
    pool = worker_pool("tf", 2)
    assert pool.run(refused, False) == ["none", "none"]
    for said in pool.run(refused, True):
        assert "row 2 of the first batch" in said
        assert "2.0" in said
        assert "9.0" in said


def warned(strategy: Any) -> tuple[list[str], str]:
    """Distributes pipelines. Returns the warnings, and what is said of one of which nothing may be read ahead."""

    def noisy(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, tf.float32) + tf.random.uniform([], seed=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).map(noisy).batch(4))
        numbers = tf.data.Dataset.range(8).map(lambda v: v * 2)
        strategy.experimental_distribute_dataset(numbers.batch(4))
        strategy.experimental_distribute_dataset(numbers.cache().map(lambda v: v + 1).batch(4))
        not_ahead = tf.data.Options()
        not_ahead.experimental_optimization.inject_prefetch = False
        at_once = numbers.batch(4).with_options(not_ahead)
        strategy.experimental_distribute_dataset(at_once)
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4).with_options(not_ahead))
    return [str(each.message) for each in caught if "computes" in str(each.message)], strategy.explain(at_once)


def test_what_each_process_computes_of_all_is_said_once(worker_pool: Any) -> None:
    (first, explained), (second, also_explained) = worker_pool("tf", 2).run(warned)
    assert second == []
    drawn, cached, not_ahead = first
    assert "`map(noisy)`" in drawn
    assert "RandomUniform" in drawn
    assert "`cache` comes after `map`; write it before" in cached, "though the other map is pushed"
    assert "nothing may be read ahead" in not_ahead
    assert explained == also_explained
    assert explained.startswith("Each of 2 processes computes all of it: nothing may be read ahead")


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
def test_one_process_computes_everything(policy: str) -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.explain(tf.data.Dataset.range(8).batch(4).with_options(options)).startswith("One process")


def operations_of_epochs(strategy: Any) -> list[set[str]]:
    """Reads three epochs; returns the operations that call Python or make an iterator's functions large, before each."""
    data = tf.data.Dataset.range(_ROWS).map(lambda v: v * 2).shuffle(5, seed=1).map(lambda v: v + 1).batch(_BATCH)
    distributed = strategy.experimental_distribute_dataset(data)
    found = []
    for _ in range(3):
        rows = [int(row) for batch in distributed for row in batch]
        graph = tf.compat.v1.GraphDef.FromString(distributed._pipelines[0].dataset._as_serialized_graph().numpy())
        found.append(({node.op for f in graph.library.function for node in f.node_def} & {"EagerPyFunc", "PyFunc"}, rows))
    return found


def test_the_first_batch_is_noted_in_the_first_epoch_only(worker_pool: Any) -> None:
    whole = tf.data.Dataset.range(_ROWS).map(lambda v: v * 2).shuffle(5, seed=1).map(lambda v: v + 1).batch(_BATCH)
    epochs = [[[int(row) for row in batch] for batch in whole] for _ in range(3)]
    for rank, found in enumerate(worker_pool("tf", 2).run(operations_of_epochs)):
        assert [bool(operations) for operations, _ in found] == [True, False, False]
        for batches, (_, rows) in zip(epochs, found, strict=True):
            assert rows == [int(row) for batch in batches for row in np.array_split(batch, 2)[rank]]
